"""What one row measures, and which rows there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Place = Literal["memory", "mmap", "stream", "llama.cpp"]

AUTO = "auto"  # a tree sized by cost
PLAIN = "none"  # no tree

_NAMES = {"memory": "in memory", "mmap": "memory-mapped", "stream": "streamed", "llama.cpp": "llama.cpp"}
_OFFLOAD = {"memory": "none", "mmap": "mmap", "stream": "stream"}


@dataclass(frozen=True)
class Setting:
    """One row to be measured.

    Attributes:
        place: where the target's weights are.
        tree: most nodes a pass, "auto" or "none".
        load: arguments of `edgespec.load`.
        capped: whether it runs within the memory cap, if there is one.
        marks: what a reader must know about every figure, such as that the target is widened.
        curve: whether the seconds of passes of several row counts are measured too.
    """

    place: Place
    tree: int | str
    load: dict[str, Any] = field(default_factory=dict)
    capped: bool = True
    marks: tuple[str, ...] = ()
    curve: bool = False

    @property
    def name(self) -> str:
        """What the row is called."""
        tree = "plain" if self.tree == PLAIN else f"tree {self.tree}"
        if self.place == "llama.cpp" and self.tree != PLAIN:
            tree = f"draft {self.tree}"
        marks = f" ({', '.join(self.marks)})" if self.marks else ""
        return f"{_NAMES[self.place]}, {tree}{marks}"

    def to_json(self) -> dict[str, Any]:
        """The same, for a process of its own."""
        return asdict(self)


@dataclass(frozen=True)
class Wishes:
    """What a person asked for, as far as it decides which rows there are.

    Attributes:
        model: the target.
        load: arguments of `edgespec.load` that all rows share.
        trees: budgets to measure; "auto" among them is a tree sized by cost.
        memory: bytes that EdgeSpec may use, or None.
        cap: bytes of the control group, or None.
        offload: "auto", "stream", "mmap" or "none".
        marks: as for Setting.
    """

    model: Path
    load: dict[str, Any]
    trees: Sequence[int | str]
    memory: int | None = None
    cap: int | None = None
    offload: str = "auto"
    marks: tuple[str, ...] = ()

    @property
    def limit(self) -> int | None:
        """The memory budget in force: what was asked for, or most of the cap."""
        if self.memory is None and self.cap is not None:
            return int(self.cap * 0.95)
        return self.memory


def rows_for(wishes: Wishes, *, fits: bool, fits_machine: bool) -> list[Setting]:
    """The rows to measure, in order.

    A target that fits is measured in memory. One that does not is measured mapped and streamed, and, where
    the machine has the memory, once in memory without the limit: that is what streaming can be held against.

    Args:
        fits: whether everything fits within the limit.
        fits_machine: whether it fits without one.
    """
    if wishes.offload == "none" or (wishes.offload == "auto" and fits):
        return [_setting(wishes, "memory", PLAIN, curve=True), *_trees(wishes, "memory")]
    if wishes.offload == "mmap":
        return [_setting(wishes, "mmap", PLAIN, curve=True), *_trees(wishes, "mmap")]
    rows = []
    if fits_machine:
        rows.append(_setting(wishes, "memory", PLAIN, curve=True, unlimited=wishes.limit is not None))
    rows.append(_setting(wishes, "mmap", PLAIN))
    rows.append(_setting(wishes, "stream", PLAIN, curve=True))
    return [*rows, *_trees(wishes, "stream")]


def preparing(settings: Sequence[Setting]) -> list[Setting]:
    """Rows that the machine is measured with, and their files made, before any counts: the best one first.

    One that drafts tells about all others; where there is no room for its drafter, a plain one must do.
    """
    ours = [setting for setting in settings if setting.place in ("memory", "stream")]
    streams = [setting for setting in ours if setting.place == "stream"]
    drafted = [setting for setting in streams or ours if setting.tree != PLAIN]
    return [*drafted[:1], *streams[:1]]


def _trees(wishes: Wishes, place: Place) -> list[Setting]:
    if wishes.load.get("draft") == "none":
        return []
    return [_setting(wishes, place, tree) for tree in wishes.trees]


def _setting(
    wishes: Wishes, place: Place, tree: int | str, *, curve: bool = False, unlimited: bool = False
) -> Setting:
    load = dict(wishes.load, model=str(wishes.model), offload=_OFFLOAD[place])
    if wishes.limit is not None and not unlimited:
        load["memory"] = wishes.limit
    if tree == PLAIN:
        load = {name: value for name, value in load.items() if not name.startswith(("draft", "tree"))}
        load["draft"] = "none"
    elif tree != AUTO:
        load["tree_budget"] = tree
    marks = (*wishes.marks, "no limit") if unlimited else wishes.marks
    return Setting(place, tree, load, capped=not unlimited, marks=marks, curve=curve)
