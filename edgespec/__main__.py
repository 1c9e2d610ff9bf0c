"""The entry of the program, for `edgespec` and `python -m edgespec`."""

from __future__ import annotations

import signal


def run() -> int:
    """Import the program and run it; returns its exit code.

    Until it is imported, Ctrl-C ends the process as it ends those without a handler: there is nothing to
    clean up, and Python would print a traceback of the imports.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_pythons = handler is signal.default_int_handler  # otherwise it is ignored, as in the background
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgespec.cli.main import main

    try:
        if is_pythons:
            signal.signal(signal.SIGINT, handler)
        return main()
    except KeyboardInterrupt:  # before `main` could catch it, or while it reported something else
        return 130


if __name__ == "__main__":
    raise SystemExit(run())
