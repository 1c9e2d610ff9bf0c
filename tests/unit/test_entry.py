"""The entry of the program: signals while it is imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

IMPORTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "edgespec.cli.main":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--version"]
from edgespec.__main__ import run
code = run()
print(signal.getsignal(signal.SIGINT) is {handler})
sys.exit(code)
"""


def interrupted_while_importing(handler: str) -> subprocess.CompletedProcess[str]:
    program = IMPORTING.format(handler=handler)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Windows end processes with other codes")
def test_ctrl_c_while_importing_ends_the_program_without_a_traceback() -> None:
    done = interrupted_while_importing("signal.default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    done = interrupted_while_importing("signal.SIG_IGN")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "True"


def test_the_programs_own_handling_begins_afterwards() -> None:
    program = (
        "import signal, sys; sys.argv[1:] = ['--version']; from edgespec.__main__ import run; run(); "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
