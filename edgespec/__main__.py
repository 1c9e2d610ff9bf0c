"""`python -m edgespec` is `edgespec`."""

from __future__ import annotations

from edgespec.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
