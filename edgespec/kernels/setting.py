"""EDGESPEC_KERNELS: which kernel layouts are allowed.

ggml computes with weights as they are in the file ("plain"), or rearranged for faster kernels: "repack" is
ggml's CPU_REPACK, "amx" its AMX. Excluding one helps to find the cause when a model crashes or answers
nonsense, and lets the tests run with each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from edgespec.errors import UsageError

VARIABLE = "EDGESPEC_KERNELS"
AUTO, PLAIN = "auto", "plain"

_GGML_NAMES = {"repack": "CPU_REPACK", "amx": "AMX"}
SETTINGS = (PLAIN, *_GGML_NAMES, AUTO)


def kernels_setting() -> str:
    """The setting in force, one of SETTINGS.

    Raises:
        UsageError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "").strip().lower() or AUTO
    if value not in SETTINGS:
        raise UsageError(
            f"{VARIABLE} is '{os.environ[VARIABLE]}'.", f"It must be one of {', '.join(SETTINGS)}."
        )
    return value


def setting_of(layout: str) -> str | None:
    """The setting that allows this layout (ggml's name) alone; None if there is none."""
    return next((setting for setting, name in _GGML_NAMES.items() if name == layout), None)


def allowed_layouts(available: Sequence[str]) -> tuple[str, ...]:
    """The available layouts (ggml's names) that the setting allows, in the same order.

    Raises:
        UsageError: the setting names a layout that is unavailable or unknown.
    """
    setting = kernels_setting()
    if setting == AUTO:
        return tuple(available)
    if setting == PLAIN:
        return ()
    wanted = _GGML_NAMES[setting]
    if wanted not in available:
        others = f"it has {' and '.join(available)}" if available else "it has none but the plain one"
        raise UsageError(
            f"{VARIABLE} is '{setting}', and llama.cpp has no {wanted} kernels on this processor: {others}.",
            f"Set {VARIABLE} to {AUTO} or {PLAIN}, or unset it.",
        )
    return (wanted,)
