"""Every chat template that llama.cpp ships: calls are learned, and read back as a request's answer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgeSpecError
from edgespec.text.template import ChatTemplate
from tests.clients.llama_cpp_source import chat_templates
from tests.unit.answering import ONE, TWO, Served

OTHERS = ("functionary-medium-v3.2", "muse-glimmer")  # messages that name their recipients are not supported


@pytest.mark.slow
def test_calls_are_read_back() -> None:
    """Nothing of a call is left in the text, and nothing but calls is in the answer."""
    failed: dict[str, list[Any]] = {}
    for path in chat_templates():
        if any(name in path.name for name in OTHERS):
            continue
        with ChatTemplate(path.read_text(), "<s>", "</s>") as chat:
            render = chat.render
            served = Served(
                chat.source, lambda said, begin, given, render=render: render(said, begin, variables=given)
            )
            for calls in ONE + TWO:
                if served.form.calls.single and len(calls) > 1:
                    continue
                try:
                    text, opened = served.answer(calls)
                    found: Any = served.read_back(text, opened=opened)
                except (ValueError, EdgeSpecError) as error:
                    found = repr(error)
                # R1-Distill-Llama's ends the calls behind the second one, whatever follows.
                ended = 2 if "R1-Distill-Llama" in path.name else len(calls)
                if found != (calls[:ended], "", ""):
                    failed.setdefault(path.name, []).append((calls, found))
    assert not failed


def test_a_folder_of_templates_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jinja").touch()
    (tmp_path / "a.jinja").touch()
    monkeypatch.setenv("LLAMA_CPP_TEMPLATES", str(tmp_path))
    assert [path.name for path in chat_templates()] == ["a.jinja", "b.jinja"]
