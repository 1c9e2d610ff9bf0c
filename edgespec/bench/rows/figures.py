"""One row: its specification, the list of all rows, and their figures."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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


Curve = Mapping[int, float]  # seconds of a pass by its rows

_KNEE = 1.25


@dataclass
class Row:
    """One row of the table. Times are means over all rounds, so that their parts add up; what was not
    measured is None.

    If several texts are answered at once, times and speeds are those of the passes that extended the most of
    them, and `tokens_per_second` is that of all texts together.
    """

    name: str
    place: str
    tree: int | str
    marks: tuple[str, ...] = ()
    tokens_per_second: float | None = None  # the median
    tokens_per_second_min: float | None = None
    tokens_per_second_max: float | None = None
    samples: list[float] = field(default_factory=list)  # of repetitions, or of answers if only one was done
    tokens_per_pass: float | None = None
    nodes_per_pass: float | None = None
    round_s: float | None = None  # of drafting, the target's pass, and choosing among its results
    pass_s: float | None = None
    draft_s: float | None = None
    wait_s: float | None = None  # the part of the pass spent waiting for the disk
    rows: dict[int, int] = field(default_factory=dict)  # of passes, padding included -> how many passes
    streamed_bytes_per_pass: int | None = None
    held: float | None = None  # share of single experts in memory, if they are read one by one
    hit_rate: float | None = None  # share of needed experts that were in memory
    disk_share: float | None = None  # seconds that the disk alone needs for a pass / round_s
    compute_share: float | None = None  # seconds of the same rows with all weights in memory / pass_s
    peak_rss_bytes: int | None = None
    budget_bytes: int | None = None
    load_s: float | None = None
    prefill_tokens_per_second: float | None = None
    drafter: str | None = None
    texts: int = 0  # answered at once; 0 for one after the other
    tokens_per_second_a_text: float | None = None
    first_token_s: float | None = None  # from the beginning to a text's first token; the median
    texts_per_pass: float | None = None  # that got a token
    exact: bool | None = None  # passes obeyed the row rule
    lossy: bool | None = None
    kernels: str | None = None  # "packed" for weights repacked for this CPU, "plain" for the file's layout
    identical: bool | None = None  # to the answers of the first exact row, up to the shorter length
    promised: bool = False  # to be identical: it is exact, not lossy, and runs the same kernels
    answers: list[list[int]] = field(default_factory=list)
    cut: bool = False  # time ran out before all repetitions were done
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, spec: RowSpec, **figures: Any) -> Row:
        return cls(spec.name, spec.place, spec.tree, marks=spec.marks, **({"texts": spec.texts} | figures))

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts: names are fixed, new ones may be added."""
        row = asdict(self)
        row["tokens"] = sum(map(len, row.pop("answers")))
        row["rows"] = {str(rows): count for rows, count in sorted(self.rows.items())}
        return {name: _rounded(value) for name, value in row.items()}


@dataclass
class DiskSpeed:
    """The speed of reading the streamed file, measured before and after the rows."""

    path: str
    bytes_per_s: list[float] = field(default_factory=list)
    direct: bool = True  # reads bypassed the page cache

    @property
    def speed(self) -> float | None:
        """The mean; None if it was not measured."""
        return statistics.mean(self.bytes_per_s) if self.bytes_per_s else None


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, least and most of some speeds, as fields of a Row; empty for none."""
    if not samples:
        return {}
    return {
        "tokens_per_second": statistics.median(samples),
        "tokens_per_second_min": min(samples),
        "tokens_per_second_max": max(samples),
    }


def at(curve: Curve, rows: float) -> float:
    """Seconds of a pass of so many rows, interpolated; beyond the ends, extrapolated."""
    known = sorted(curve)
    if len(known) == 1:
        return curve[known[0]]
    right = min(max(bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return curve[low] + (curve[high] - curve[low]) * (rows - low) / (high - low)


def knee(curve: Curve) -> int:
    """The largest measured row count whose pass takes at most a quarter longer than a pass of one row."""
    first = curve[min(curve)]
    return max(rows for rows, seconds in curve.items() if seconds <= _KNEE * first)


def fill_shares(rows: Sequence[Row], speed: float | None, resident: Curve | None) -> None:
    """Fill in how close each row came to the limits of the disk and the processor."""
    for row in rows:
        if speed and row.streamed_bytes_per_pass and row.round_s:
            row.disk_share = row.streamed_bytes_per_pass / speed / row.round_s
        if resident and row.rows and row.pass_s and row.place in ("memory", "stream"):
            passes = sum(row.rows.values())
            alone = sum(at(resident, n) * count for n, count in row.rows.items()) / passes
            row.compute_share = alone / row.pass_s


def fill_identical(rows: Sequence[Row]) -> None:
    """Fill in whether each row's answers are those of the first exact row, or else of the first.

    Of exact rows, one with packed weights is preferred, since most rows run those kernels.
    """
    done = [row for row in rows if row.answers]
    if not done:
        return
    exact = sorted((row for row in done if row.exact and not row.lossy), key=lambda r: r.kernels != "packed")
    first = exact[0] if exact else done[0]
    for row in done:
        row.promised = row in exact and row.kernels == first.kernels
        row.identical = all(
            mine[: len(theirs)] == theirs[: len(mine)]
            for mine, theirs in zip(row.answers, first.answers, strict=False)
        )


def broken_promises(rows: Sequence[Row]) -> list[Row]:
    """Rows whose answers had to be those of the first exact one, and were not."""
    return [row for row in rows if row.promised and row.identical is False]


def _rounded(value: Any) -> Any:
    """Six significant digits; more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value
