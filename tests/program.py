"""The program `edgespec` in this process, where starting it would show no more: a start takes a second."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from unittest.mock import patch

import pytest

from edgespec.cli.main import main


def run_captured(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the program; returns its exit code, and what it printed as results and beside them."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_here(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program with this text on standard input, and files in place of its other streams."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())  # less than a pipe holds
    os.close(writer)
    with (
        os.fdopen(reader, encoding="utf-8") as stdin,
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        with (
            patch.object(sys, "stdin", stdin),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(arguments)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())
