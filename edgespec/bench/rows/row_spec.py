"""The specification of one row, and the list of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgespec.config import OPTIONS, Config

Place = Literal["memory", "mmap", "stream", "llama.cpp"]

AUTO = "auto"  # a tree sized by cost
PLAIN = "none"  # no tree

BUDGET_SHARE = 0.95  # of a memory cap; the rest is for what nobody counts

_PLAIN = {name: option.default for name, option in OPTIONS.items() if name.startswith(("draft", "tree"))} | {
    "draft": "none"
}
_NAMES = {"memory": "in memory", "mmap": "memory-mapped", "stream": "streamed", "llama.cpp": "llama.cpp"}
_OFFLOAD = {"memory": "none", "mmap": "mmap", "stream": "stream"}


@dataclass(frozen=True)
class RowSpec:
    """A row to measure.

    Attributes:
        place: where the target's weights are.
        tree: most nodes a pass, "auto" or "none".
        load: the options of loading.
        capped: whether it runs within the memory cap, if there is one.
        cap: bytes of a cap of its own; None for that of all rows.
        marks: what a reader must know about all figures of the row, such as that the target is widened.
        curve: whether the seconds of passes of several row counts are measured too.
        texts: how many are answered at once; 0 for one after the other.
    """

    place: Place
    tree: int | str
    load: Config = field(default_factory=Config)
    capped: bool = True
    marks: tuple[str, ...] = ()
    curve: bool = False
    texts: int = 0
    cap: int | None = None

    @property
    def name(self) -> str:
        """The name of the row."""
        marks = f" ({', '.join(self.marks)})" if self.marks else ""
        if self.texts:
            trees = "" if self.tree == PLAIN else f", tree {self.tree}"
            return f"{_NAMES[self.place]}, {self.texts} text{'s'[: self.texts != 1]}{trees}{marks}"
        tree = "plain" if self.tree == PLAIN else f"tree {self.tree}"
        if self.place == "llama.cpp" and self.tree != PLAIN:
            tree = f"draft {self.tree}"
        return f"{_NAMES[self.place]}, {tree}{marks}"


@dataclass(frozen=True)
class RowOptions:
    """The part of a request that decides which rows there are.

    Attributes:
        load: the options of loading that all rows share.
        trees: budgets to measure; "auto" among them is a tree sized by cost.
        cap: bytes of the control group, or None.
        marks: as for RowSpec.
        texts: numbers of texts to answer at once, each a row of its own.
        held: budgets that hold so many percent of a mixture's experts, each a row of its own.
    """

    load: Config
    trees: Sequence[int | str]
    cap: int | None = None
    marks: tuple[str, ...] = ()
    texts: Sequence[int] = ()
    held: Mapping[int, int] = field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """The memory budget in force: the one requested, or most of the cap."""
        if self.load.memory.limit is None and self.cap is not None:
            return int(self.cap * BUDGET_SHARE)
        return self.load.memory.limit


def rows_for(options: RowOptions, *, fits: bool, fits_machine: bool, experts: bool = False) -> list[RowSpec]:
    """The rows to measure, in order.

    A target that fits is measured in memory. One that does not is measured mapped and streamed, and, where
    the machine has enough memory, once in memory without the limit, as a baseline for streaming.

    Args:
        fits: whether everything fits within the limit.
        fits_machine: whether it fits without one.
        experts: whether its experts can be streamed one by one; then whole layers are a row, too.
    """
    offload = options.load.memory.offload
    if offload == "none" or (offload == "auto" and fits):
        return [_spec(options, "memory", PLAIN, curve=True), *_more(options, "memory")]
    if offload == "mmap":
        return [_spec(options, "mmap", PLAIN, curve=True), *_more(options, "mmap")]
    rows = []
    if fits_machine:
        rows.append(_spec(options, "memory", PLAIN, curve=True, unlimited=options.limit is not None))
    rows.append(_spec(options, "mmap", PLAIN))
    if experts:
        rows.append(_whole_layers(options))
    rows.append(_spec(options, "stream", PLAIN, curve=not experts))
    rows += [_held(options, percent, budget) for percent, budget in sorted(options.held.items())]
    return [*rows, *_more(options, "stream")]


def preparation_rows(specs: Sequence[RowSpec]) -> list[RowSpec]:
    """Rows to load once beforehand, which makes their files: the best one first.

    A row with a drafter covers all others; a plain one is the fallback if its drafter does not fit.
    """
    ours = [spec for spec in specs if spec.place in ("memory", "stream")]
    streams = [spec for spec in ours if spec.place == "stream"]
    drafted = [spec for spec in streams or ours if spec.tree != PLAIN]
    return [*drafted[:1], *streams[:1]]


def _more(options: RowOptions, place: Place) -> list[RowSpec]:
    """Rows with trees, and rows of many texts: without drafts and, if there is a drafter, with trees."""
    trees: list[int | str] = [PLAIN, AUTO] if options.load.speculation.drafts else [PLAIN]
    many = [_spec(options, place, tree, texts=texts) for texts in options.texts for tree in trees]
    return [*_trees(options, place), *many]


def _trees(options: RowOptions, place: Place) -> list[RowSpec]:
    if not options.load.speculation.drafts:
        return []
    return [_spec(options, place, tree) for tree in options.trees]


def _whole_layers(options: RowOptions) -> RowSpec:
    spec = _spec(options, "stream", PLAIN)
    return replace(
        spec, load=spec.load.with_(experts="never", exact=False), marks=(*spec.marks, "whole layers")
    )


def _held(options: RowOptions, percent: int, budget: int) -> RowSpec:
    """Single experts in a budget of their own, and in a cap if the other rows have one."""
    spec = _spec(options, "stream", PLAIN)
    return replace(
        spec,
        load=spec.load.with_(memory=budget),
        marks=(*spec.marks, f"{percent} % of the experts"),
        cap=int(budget / BUDGET_SHARE) if options.cap is not None else None,
    )


def _spec(
    options: RowOptions,
    place: Place,
    tree: int | str,
    *,
    curve: bool = False,
    unlimited: bool = False,
    texts: int = 0,
) -> RowSpec:
    load = options.load.with_(offload=_OFFLOAD[place], memory=None if unlimited else options.limit)
    if tree == PLAIN:
        load = load.with_(**_PLAIN)
    elif tree != AUTO:
        load = load.with_(tree_budget=tree)
    if texts:
        load = load.with_(parallel=texts, text_tokens=load.model.context)
    marks = (*options.marks, "no limit") if unlimited else options.marks
    return RowSpec(place, tree, load, capped=not unlimited, marks=marks, curve=curve, texts=texts)
