"""The specification of one row, and the list of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgespec.config import OPTIONS, Config

Place = Literal["memory", "mmap", "stream"]

AUTO = "auto"  # a tree sized by cost
PLAIN = "none"  # no tree

_PLAIN = {name: option.default for name, option in OPTIONS.items() if name.startswith(("draft", "tree"))} | {
    "draft": "none"
}
_NAMES = {"memory": "in memory", "mmap": "memory-mapped", "stream": "streamed"}
_OFFLOAD = {"memory": "none", "mmap": "mmap", "stream": "stream"}


@dataclass(frozen=True)
class RowSpec:
    """A row to measure."""

    place: Place  # of the target's weights
    tree: int | str  # most nodes a pass, "auto" or "none"
    load: Config = field(default_factory=Config)
    marks: tuple[str, ...] = ()  # that concern all figures of the row, such as "widened"
    curve: bool = False  # measure passes of several row counts, too
    texts: int = 0  # answered at once; 0 for one after the other

    @property
    def name(self) -> str:
        """The name of the row."""
        marks = f" ({', '.join(self.marks)})" if self.marks else ""
        tree = "plain" if self.tree == PLAIN else f"tree {self.tree}"
        if self.texts:
            texts = f"{self.texts} text{'s'[: self.texts != 1]}"
            tree = texts if self.tree == PLAIN else f"{texts}, {tree}"
        return f"{_NAMES[self.place]}, {tree}{marks}"


def rows_for(
    load: Config,
    trees: Sequence[int | str],
    texts: Sequence[int] = (),
    marks: tuple[str, ...] = (),
    *,
    fits: bool,
    fits_machine: bool,
    experts: bool = False,
) -> list[RowSpec]:
    """The rows to measure, in order.

    A target that fits is measured in memory. One that does not is measured mapped and streamed, and, where
    the machine has enough memory, once in memory without the limit, as a baseline for streaming.

    Args:
        trees: node budgets; "auto" among them is a tree sized by cost.
        texts: numbers of texts to answer at once, each a row of its own.
        fits: everything fits within the limit of memory.
        fits_machine: it fits without one.
        experts: experts are read one by one, so that the cost of a pass depends on its tokens.
    """
    offload = load.memory.offload
    place: Place = "stream"
    if offload == "none" or (offload == "auto" and fits):
        place = "memory"
    elif offload == "mmap":
        place = "mmap"
    rows = []
    if place == "stream":
        if fits_machine:
            limited = load.memory.limit is not None
            free = (*marks, "no limit") if limited else marks
            rows.append(_spec(load.with_(memory=None), "memory", PLAIN, free, curve=True))
        rows.append(_spec(load, "mmap", PLAIN, marks))
    rows.append(_spec(load, place, PLAIN, marks, curve=place != "stream" or not experts))
    drafts = load.speculation.drafts
    rows += [_spec(load, place, tree, marks) for tree in (trees if drafts else ())]
    many = (PLAIN, AUTO) if drafts else (PLAIN,)
    return rows + [_spec(load, place, tree, marks, texts=count) for count in texts for tree in many]


def preparation_rows(specs: Sequence[RowSpec]) -> list[RowSpec]:
    """Rows to load once beforehand, which makes their files: the best one first.

    A row with a drafter covers all others; a plain one is the fallback if its drafter does not fit.
    """
    ours = [spec for spec in specs if spec.place in ("memory", "stream")]
    streams = [spec for spec in ours if spec.place == "stream"]
    drafted = [spec for spec in streams or ours if spec.tree != PLAIN]
    return [*drafted[:1], *streams[:1]]


def _spec(
    load: Config,
    place: Place,
    tree: int | str,
    marks: tuple[str, ...],
    *,
    curve: bool = False,
    texts: int = 0,
) -> RowSpec:
    load = load.with_(offload=_OFFLOAD[place])
    if tree == PLAIN:
        load = load.with_(**_PLAIN)
    elif tree != AUTO:
        load = load.with_(tree_budget=tree)
    if texts:
        load = load.with_(parallel=texts, text_tokens=load.model.context)
    return RowSpec(place, tree, load, marks, curve, texts)
