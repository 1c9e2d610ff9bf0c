"""What Wine lacks of Windows."""

from __future__ import annotations

import ctypes
import sys

import pytest

_WINE = sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")
needs_limits = pytest.mark.skipif(_WINE, reason="Wine knows of jobs' limits, and does not keep them")
needs_owners = pytest.mark.skipif(_WINE, reason="Wine does not always say which process a connection is of")
