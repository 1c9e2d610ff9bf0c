"""EDGESPEC_KERNELS: which kernel layouts are allowed.

ggml computes with weights as they are in the file ("plain"), or rearranged for faster kernels: "repack" is
ggml's CPU_REPACK, and "edgespec" EdgeSpec's own kernels. These can be had for a single
instruction set, too, such as "edgespec-avx2". Excluding one helps to find the cause when a model crashes or
answers nonsense, and lets the tests run with each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from edgespec.base.installation import install_command
from edgespec.errors import UsageError
from edgespec.kernels.native.build import COMMAND

VARIABLE = "EDGESPEC_KERNELS"
AUTO, PLAIN = "auto", "plain"

OWN = "EDGESPEC"  # the layout of EdgeSpec's own kernels

_NAMES = {"repack": "CPU_REPACK", "edgespec": OWN}
SETTINGS = (PLAIN, *_NAMES, AUTO)
_INSTRUCTION_SETS = ("avx2", "avx2-vnni", "avx512-vnni", "amx", "neon-dotprod", "neon-i8mm")


def kernels_setting() -> str:
    """The setting in force: one of SETTINGS, or "edgespec-" and an instruction set.

    Raises:
        UsageError: the variable has another value.
    """
    value = os.environ.get(VARIABLE, "").strip().lower() or AUTO
    if value not in SETTINGS and value not in map(setting_for, _INSTRUCTION_SETS):
        raise UsageError(f"{VARIABLE} must be one of {', '.join(SETTINGS)}, not '{os.environ[VARIABLE]}'.")
    return value


def setting_of(layout: str) -> str | None:
    """The setting that allows this layout (ggml's name) alone; None if there is none."""
    return next((setting for setting, name in _NAMES.items() if name == layout), None)


def kernels_of(layout: str) -> str:
    """The kernels of a layout, for the beginning of a sentence."""
    return "EdgeSpec's own kernels" if layout == OWN else f"llama.cpp's {layout} kernels"


def cost_of_missing(layout: str) -> str:
    """A sentence on the cost of leaving out a layout's kernels."""
    if layout == OWN:
        passes = "passes of many rows, such as those that verify trees"
        return f"Answers are right, but {passes}, take 2 to 4 times as long."
    return "Answers are right, but slower than they could be."


def rebuild_command(layout: str = "") -> str:
    """A shell command that rebuilds llama.cpp, or EdgeSpec's own kernels, so that a layout's kernels work."""
    if layout == OWN:
        return f"{COMMAND} --again"
    return install_command(rebuild=True)


def setting_for(instruction_set: str) -> str:
    """The setting that allows EdgeSpec's own kernels alone, with this instruction set."""
    return f"{setting_of(OWN)}-{instruction_set}"


def instruction_set() -> str | None:
    """The instruction set that EdgeSpec's own kernels are to use; None for the best.

    Raises:
        UsageError: the variable has an unknown value.
    """
    setting = kernels_setting()
    return next((name for name in _INSTRUCTION_SETS if setting_for(name) == setting), None)


def own_allowed() -> bool:
    """Check that EdgeSpec's own kernels may be used.

    Raises:
        UsageError: the variable has an unknown value.
    """
    return kernels_setting() in (AUTO, setting_of(OWN)) or instruction_set() is not None


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
    wanted = OWN if instruction_set() else _NAMES[setting]
    if wanted == OWN and OWN not in available:
        raise UsageError(
            f"{VARIABLE} is '{setting}', and EdgeSpec's own kernels cannot be used here.",
            f"`edgespec doctor` says why; {COMMAND} compiles them. Or unset {VARIABLE}.",
        )
    if wanted not in available:
        others = f"it has {' and '.join(available)}" if available else "it has none but the plain one"
        raise UsageError(
            f"{VARIABLE} is '{setting}', and llama.cpp has no {wanted} kernels on this processor: {others}.",
            f"Set {VARIABLE} to {AUTO} or {PLAIN}, or unset it.",
        )
    return (wanted,)
