"""What Wine lacks of Windows."""

from __future__ import annotations

import ctypes
import sys

import pytest

needs_limits = pytest.mark.skipif(
    sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version"),
    reason="Wine knows of jobs' limits, and does not keep them",
)
