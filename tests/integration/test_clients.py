"""Programs that people use, stood in for by one that is honest and one that loses what its tool returned.

The packages of others are stood in for by wheels in a folder, which pip installs as it does from the index.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.clients.conversation import converse
from tests.clients.installing import Installed, NpmPackage, PythonPackage
from tests.clients.model import scripted_model
from tests.clients.programs import CHAT, Program
from tests.clients.report import Row
from tests.clients.running import Failed
from tests.conftest import TEST_MODELS

pytestmark = pytest.mark.slow  # it tests a tool, which is run by hand

_PROGRAM = """\
#!{python}
import json, os, sys
from pathlib import Path
import openai

path = Path.home() / "conversation.json"
messages = json.loads(path.read_text()) if "--continue" in sys.argv else []
parameters = {{"type": "object", "properties": {{"path": {{"type": "string"}}}}, "required": ["path"]}}
tools = [{{"type": "function", "function": {{"name": "read_file", "parameters": parameters}}}}]
client = openai.OpenAI(base_url=os.environ["ADDRESS"] + "/v1", api_key="none", max_retries=0)
messages.append({{"role": "user", "content": sys.argv[-1]}})
while True:
    answer = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    for call in answer.tool_calls or []:
        text = Path(json.loads(call.function.arguments)["path"]).read_text()
        messages.append({{"role": "tool", "tool_call_id": call.id, "content": {result}}})
    if not answer.tool_calls:
        break
path.write_text(json.dumps(messages))
print(answer.content)
if {asks_more}:
    client.chat.completions.create(model="any", messages=[])
"""


@pytest.mark.parametrize(("result", "asks_more"), [("text", False), ("'nothing'", False), ("text", True)])
def test_a_conversation_is_held_and_judged(tmp_path: Path, result: str, asks_more: bool) -> None:
    binary = tmp_path / "program"
    binary.write_text(_PROGRAM.format(python=sys.executable, result=result, asks_more=asks_more))
    binary.chmod(0o755)
    program = Program(
        "A program",
        NpmPackage("none", "program"),
        CHAT,
        lambda question, resumes: [*(["--continue"] if resumes else []), question],
        environment=lambda url: {"ADDRESS": url},
    )
    model = scripted_model(TEST_MODELS, None)
    held = converse(program, Installed(binary, "1.0"), model, tmp_path / "own", turns=2, limit_s=600)
    first = held.turns[0]
    assert first.called == "read_file"
    assert [len(turn.requests) for turn in held.turns] == ([2] if asks_more else [2, 2])
    assert first.requests[1]["read_tokens"] < first.requests[0]["prompt_tokens"] / 2
    assert Row("A program", "1.0", held).passed == (result == "text" and not asks_more)
    assert first.result_came == (result == "text")
    assert held.changed == []
    if asks_more:
        assert first.failure.startswith("exit status 1: ")
        assert "messages must be a non-empty list" in held.refused[0]


THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_python_package_is_installed_once_without_what_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "installed"
    wheels.mkdir()
    _make_wheel(wheels, "shown", "needed", "left-out>=2", 'extra-one; extra == "all"')
    _make_wheel(wheels, "needed")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    package = PythonPackage("shown", ("2.1", THIS_PYTHON), without=["Left.Out"])
    installed = package.install(folder)
    assert installed.version == "1.0"
    assert subprocess.run([installed.binary, "-c", "import shown, needed"]).returncode == 0
    (wheels / "shown-1.0-py3-none-any.whl").unlink()
    assert package.install(folder) == installed


def test_a_python_package_that_cannot_be_installed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Failed, match=r"there is no Python 2\.1 or 2\.2"):
        PythonPackage("shown", ("2.1", "2.2")).install(tmp_path / "installed")
    with pytest.raises(Failed, match="not installed: exit status 1: "):
        PythonPackage("shown", (THIS_PYTHON,)).install(tmp_path / "installed")
    assert list(tmp_path.iterdir()) == []


def _make_wheel(folder: Path, name: str, *requirements: str) -> None:
    about = f"{name}-1.0.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {each}" for each in requirements]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
