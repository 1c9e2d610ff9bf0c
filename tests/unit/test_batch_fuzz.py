"""Lines of a batch that hold anything: each is answered, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgespec.cli.batch.input_file import read_jobs
from edgespec.cli.main import main
from edgespec.generation.config import GenerationConfig
from tests.unit.talking import TalkingEngine, records

FIELDS = [*GenerationConfig.__dataclass_fields__, "id", "n", "prompt", "messages", "json_schema", "grammar"]

numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**64, -1, 0, 1e308, float("nan"), float("inf")])
)
# Half a surrogate pair is no text, and JSON can spell it.
texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["\ud800", "\udcff", "auto", "block"])
leaves = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "boss"]) | values, "content": texts | values}),
    max_size=3,
)
lines = st.dictionaries(st.sampled_from(FIELDS) | texts, values, max_size=4).flatmap(
    lambda fields: st.sampled_from([fields, fields | {"prompt": "Hi"}])
) | st.fixed_dictionaries({"messages": messages}, optional={"temperature": numbers, "id": values})

BODY = [
    *("messages", "prompt", "max_tokens", "temperature", "seed", "stop", "n", "stream", "stream_options"),
    *("response_format", "grammar", "json_schema", "tools", "model"),
]
bodies = st.dictionaries(st.sampled_from(BODY), values, max_size=3).flatmap(
    lambda fields: st.sampled_from([fields, fields | {"prompt": "Hi"}, fields | {"prompt": [1, 2]}])
)
requests = st.fixed_dictionaries(
    {"custom_id": texts, "body": bodies | values},
    optional={
        "method": st.just("POST") | values,
        "url": st.sampled_from(["/v1/completions", "/v1/chat/completions"]) | values,
    },
)


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@settings(deadline=None)
@given(
    st.lists(
        (lines | requests).map(line)
        | st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"") + b"\n")
    )
)
@example([b'{"a": ' * 5000 + b"\n"])
@example([b'{"prompt": "a", "id": 1' + b"0" * 4000 + b"}\n"] * 2)
def test_every_line_is_a_job_or_an_error(batch: list[bytes]) -> None:
    jobs = list(read_jobs(batch))
    assert len(jobs) == sum(bool(line.strip()) for line in batch)
    for job in jobs:
        assert bool(job.error) or job.prompt
        json.dumps([job.identifier, job.prompt])  # as the result will be written


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(batch=st.lists(lines.map(line), min_size=1, max_size=4))
@example(batch=[line({"prompt": "a", "temperature": 10**400, "top_k": 10**400, "max_tokens": 10**400})])
@example(batch=[line({"prompt": "a\x85b\u2028c"})])
@example(batch=[line({"prompt": "a", "id": "\ud800", "verify": "lenience:factor=1e999"})])
def test_every_line_has_a_result(
    batch: list[bytes], engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"".join(batch) + line({"id": "the last line", "prompt": "Hi"}))
    output.unlink(missing_ok=True)
    code = main(["generate", "--input", str(path), "--output", str(output)])
    assert "bug" not in capsys.readouterr().err
    results = records(output.read_text(encoding="utf-8"))
    failed = [r for r in results if r["finish_reason"] == "error"]
    assert code == (1 if failed else 0)
    assert all(r["error"].startswith("line ") for r in failed)
    assert results[-1]["finish_reason"] == "stop"
    assert len(results) >= len(batch) + 1


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(batch=st.lists(requests.map(line), min_size=1, max_size=4))
@example(batch=[line({"custom_id": "\ud800", "method": "POST", "url": "\ud800", "body": {}})])
def test_every_request_has_a_result(
    batch: list[bytes], engine: TalkingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = SimpleNamespace(n_tokens=10)
    engine.target = SimpleNamespace(model=SimpleNamespace(vocabulary=vocabulary))  # type: ignore[attr-defined]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"".join(batch))
    output.unlink(missing_ok=True)
    code = main(["generate", "--input", str(path), "--output", str(output)])
    assert "bug" not in capsys.readouterr().err
    results = records(output.read_text(encoding="utf-8"))
    failed = [r for r in results if r["response"]["status_code"] != 200]
    assert code == (1 if failed else 0)
    assert len(results) == len(batch)
    again = output.read_bytes()
    assert main(["generate", "--input", str(path), "--output", str(output)]) == code
    assert output.read_bytes() == again
