"""The options of loading are declared once, and every view of them agrees."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import edgespec
from edgespec.cli.main import app
from edgespec.config import OPTIONS, TREES, Config
from edgespec.drafters.kinds import DRAFTER_KINDS, NO_DRAFTER
from edgespec.errors import UsageError
from edgespec.loading.arguments import LoadArguments
from edgespec.models.gguf.footprint import CACHE_TYPES
from edgespec.speculation.policies import NAMES

RECORD = Path(__file__).parent / "data" / "options.json"
"""Flags that scripts use, each with the commands that have it: they must stay."""


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(words), command
        return
    for name, below in command.commands.items():
        yield from leaves(below, (*words, name))


def flags() -> dict[str, list[str]]:
    """Each form of an option with its metavar, its variables and whether it repeats, and its commands."""
    found: dict[str, list[str]] = {}
    for words, command in leaves(typer.main.get_command(app)):
        for one in command.params:
            variables = [one.envvar] if isinstance(one.envvar, str) else one.envvar or []
            kind = "..." if getattr(one, "multiple", False) or one.nargs == -1 else ""
            parts = [*one.opts, *one.secondary_opts, f"{one.metavar or ''}{kind}", *variables]
            found.setdefault(" ".join(filter(None, parts)), []).append(words)
    return found


def test_flags_and_variables_are_those_that_scripts_use() -> None:
    recorded = {form: words.split(", ") for form, words in json.loads(RECORD.read_text()).items()}
    assert flags() == recorded


def test_the_library_takes_every_option() -> None:
    of_load = {name for name, (_, one) in OPTIONS.items() if one.option.of_load}
    assert {"model", *LoadArguments.__annotations__} == of_load
    assert [*LoadArguments.__annotations__] == [n for n in OPTIONS if n in LoadArguments.__annotations__]
    parameters = inspect.signature(edgespec.load).parameters
    assert parameters.keys() - {"on_progress"} == of_load
    documented = inspect.getdoc(edgespec.load) or ""
    assert all(f"\n    {name}: " in documented for name in parameters)
    assert "--" not in documented


def test_words_are_those_of_the_packages_that_understand_them() -> None:
    words = {name: tuple(one.option.values.words) for name, (_, one) in OPTIONS.items()}
    assert words["kv"] == tuple(CACHE_TYPES)
    assert words["tree"] == TREES == NAMES
    assert {*words["drafter"], NO_DRAFTER} == DRAFTER_KINDS.keys()


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("memory", "1.5GiB", 3 * 2**29),
        ("context", " 99 ", 99),
        ("tree_budget", "AUTO", None),
        ("tree_budget", "12", 12),
        ("gpu_layers", "-1", "all"),
        ("gpu_layers", -1, "all"),
        ("gpu_layers", "12", 12),
        ("parallel", "7", 7),
        ("device", "CUDA0, CUDA1,", ("CUDA0", "CUDA1")),
        ("device", ["CUDA0"], ("CUDA0",)),
        ("lora", ["a,b:1"], ("a,b:1",)),
        ("draft_from", Path("notes"), "notes"),
        ("threads", None, None),
    ],
)
def test_values_are_read(name: str, given: Any, read: Any) -> None:
    config = Config.of(**{name: given})
    group, one = OPTIONS[name]
    assert getattr(getattr(config, group), one.field.name) == read
    kept = list(read) if isinstance(read, tuple) else read
    assert config.arguments() == ({} if read is None else {name: kept})
    assert Config.of(**json.loads(json.dumps(config.arguments()))) == config


@pytest.mark.parametrize(
    ("name", "given", "what"),
    [
        ("context", 15, "context is 15. It must be from 16 to 10000000."),
        ("context", "١٦", "context is '١٦'. It must be from 16 to 10000000."),
        ("context", True, "context is True. It must be from 16 to 10000000."),
        ("context", None, "context is None. It must be from 16 to 10000000."),
        ("threads", 1025, "threads is 1025. It must be from 1 to 1024."),
        ("memory", 0, "memory is 0. It must be above 0 and below 8 EiB."),
        ("memory", "lots", "'lots' is not a size. Write it like 12GiB, 800MB or 4000000000."),
        ("gpu_layers", "some", "gpu_layers is 'some'. It must be from 0 to 999999, auto or all."),
        ("offload", "gpu", "offload is 'gpu'. It must be auto, stream, mmap or none."),
        ("kv", "q4_0", "kv is 'q4_0'. It must be f16 or q8_0."),
        ("exact", "yes", "exact is 'yes'. It must be true or false."),
        ("lora", 3, "lora is 3. It must be a list of strings."),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name: str, given: Any, what: str) -> None:
    with pytest.raises(UsageError) as refused:
        Config.of(**{name: given})
    assert str(refused.value) == what


@pytest.mark.parametrize("other", [{"offload": "stream"}, {"gpu_layers": 3}, {"draft_device": "CUDA0"}])
def test_options_that_contradict_each_other_are_refused(other: dict[str, Any]) -> None:
    Config.of(**other)
    with pytest.raises(UsageError, match="do not go together"):
        Config.of(workers=["localhost:1"]).with_(**other)
