"""Child processes end when their parent is killed, even if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until, wait_until_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")

# A child says that it runs, and hangs.
_HANGS = "from pathlib import Path; import signal; Path('runs').touch(); signal.pause()"
_HANGING_MODULE = """
from pathlib import Path
import time

def attempt(request):
    Path("runs").touch()
    time.sleep(1e6)
"""

_PARENTS = {
    "a trial of kernels": (
        "from edgespec.kernels.trial import run_trial",
        f"run_trial([sys.executable, '-c', {_HANGS!r}])",
    ),
    "a capped program": (
        "from benchmarks.capped import run_capped",
        f"run_capped([sys.executable, '-c', {_HANGS!r}], None)",
    ),
    "a trial of anything": (
        "from pathlib import Path; from edgespec.processes.trial import attempt_in_child",
        "sys.path.insert(0, str(Path('modules').absolute()))\n"
        "attempt_in_child('hanging', {}, subject='It', cpu_s=100)",
    ),
    "the renderer of templates": (
        "from pathlib import Path; from edgespec.text.template_process import TemplateProcess",
        "child = TemplateProcess(); child._await_ready(); Path('runs').touch(); signal.pause()",
    ),
}


@pytest.mark.parametrize("child", _PARENTS)
def test_a_child_ends_with_its_parent(tmp_path: Path, child: str) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hanging.py").write_text(_HANGING_MODULE)
    imports, work = _PARENTS[child]
    with _parent(tmp_path, imports, work) as parent:
        wait_until(lambda: parent.poll() is not None or (tmp_path / "runs").exists())
        children = _killed(parent)
    assert children
    wait_until_ended(*children)


def test_the_quantizer_ends_with_its_parent(tmp_path: Path, short_path: Path) -> None:
    """It is stopped, as it would be done in a moment."""
    work = f"make_drafter(Path({str(short_path)!r}), Path('out.gguf'), quantization='q4_0')"
    imports = "from pathlib import Path; from edgespec.llama.quantize import make_drafter"
    with _parent(tmp_path, imports, work) as parent:

        def worker() -> psutil.Process | None:
            children = psutil.Process(parent.pid).children(recursive=True)
            return next((c for c in children if "edgespec.llama.quantize_worker" in c.cmdline()[:8]), None)

        found = wait_until(lambda: parent.poll() is not None or worker())
        assert isinstance(found, psutil.Process), "the parent has failed"
        found.suspend()
        _killed(parent)
    wait_until_ended(found)


def _parent(folder: Path, imports: str, work: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)}
    program = f"import signal, sys\n{imports}\n{work}"
    return subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=environment)


def _killed(parent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Kill a process; returns the children that it had."""
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    return children
