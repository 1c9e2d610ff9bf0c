"""A reader of images that never ends, for what must not wait for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


def attempt(_request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hang."""
    while True:
        time.sleep(1)
