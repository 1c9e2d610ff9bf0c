"""Vetting model files: a child process loads each of them first.

llama.cpp has hundreds of assertions that abort on an inconsistent header, and `gguf.header_checks`
anticipates only some of them. So no file is loaded here before a child process has loaded its header,
computed a few rows with zeros for its weights, and survived. The verdict is saved for that header and
llama.cpp build: a file is tried once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.base.option import named
from edgespec.errors import InconclusiveTrial, ModelFileError, UsageError
from edgespec.files.cache_kind import CacheKind
from edgespec.files.small_json import read_json, remembered
from edgespec.files.state import FileState
from edgespec.llama.runtime.backend import build_identity
from edgespec.models.gguf.embedding import embedding_shape
from edgespec.models.gguf.head_family import head_family
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import parts_by_name
from edgespec.models.gguf.types import GGUFHeader
from edgespec.processes.trial import attempt_in_child

# Of processor time: the largest vocabularies take two seconds, and computing with zeros 0.1 s a gigabyte.
_MAX_S, _MAX_S_PER_GB = 20.0, 2.0
_TRIAL = "edgespec.llama.load_trial"

# Files whose headers this process need not look up again, with their layers for further tokens or without.
_survived: dict[tuple[Path, bool], FileState] = {}
_orders: dict[Path, tuple[str, ...]] = {}


@dataclass(frozen=True)
class _Verdict:
    """The outcome of vetting a file."""

    failure: str  # the reason that llama.cpp ends; empty if it survives
    order: tuple[str, ...] = ()  # as `reading_order`

    @classmethod
    def from_json(cls, kept: Any) -> _Verdict:
        return cls("" + kept["failure"], tuple("" + name for name in kept["order"]))


def require_loadable(
    headers: Sequence[GGUFHeader],
    beside: GGUFHeader | None = None,
    *,
    mtp: bool = False,
    trial: str = _TRIAL,
) -> None:
    """Make sure that llama.cpp survives loading a model, a draft head or a LoRA adapter.

    Args:
        headers: of its files, the first one first.
        beside: of the target whose matrices it borrows, for a draft head; of the model that it is applied to,
            for a LoRA adapter.
        mtp: the model is to be loaded with its layers for multi-token prediction, which draft.
        trial: the module of the child's part; see `attempt_in_child`.

    Raises:
        ModelFileError: it does not.
        UsageError: it does not survive drafting with these layers.
        InconclusiveTrial: the child process that was to find out was killed, starved or refused memory.
    """
    place = _place(headers if beside is None else [*headers, beside], mtp=mtp, trial=trial)
    tried = [*headers, *([beside] if beside else [])]
    earlier = _time_of(place)

    def try_out() -> _Verdict:
        nonlocal earlier
        earlier = ""
        before = [FileState.of(header.path) for header in tried]
        seconds = _MAX_S + _MAX_S_PER_GB * sum(header.file_bytes for header in tried) / 1e9
        verdict = _try_out(trial, headers[0], beside, seconds, mtp=mtp)
        if [FileState.of(header.path) for header in tried] != before:
            raise InconclusiveTrial(_subject(headers[0]), "read a file that was being changed")
        return verdict

    failure = remembered(place, _Verdict.from_json, try_out, asdict).failure
    found = f", as a trial found on {earlier}" if earlier else ""
    again = " To try it again: edgespec config --forget" if earlier else ""
    if failure and mtp:
        raise UsageError(
            f"The MTP layer of {headers[0].path.name} cannot draft: llama.cpp fails on the layer "
            f"({failure}){found}.",
            f"Leave out {named('draft', 'mtp')}, or get another conversion of the model.{again}",
        )
    if failure:
        raise ModelFileError(
            f"llama.cpp fails to load {headers[0].path} ({failure}){found}.",
            "It is damaged or made for another llama.cpp. Download it again, or get another conversion."
            + again,
        )
    for header in headers:
        state, path = FileState.of(header.path), header.path.absolute()
        _survived[path, False] = state
        if mtp:
            _survived[path, True] = state


def reading_order(headers: Sequence[GGUFHeader]) -> tuple[str, ...]:
    """The names of a vetted model's matrices in the order in which a pass reads them; empty if not known.

    A matrix that several operations read is named for each of them.
    """
    place = _place(headers, mtp=False)
    if place not in _orders and (known := read_json(place, _Verdict.from_json)) is not None:
        _orders[place] = known.order
    return _orders.get(place, ())


def require_survived(path: Path, *, mtp: bool = False) -> None:
    """Make sure that a file about to be loaded, with its further parts, has been vetted as it is now.

    Raises:
        ModelFileError: llama.cpp does not survive loading it, or it is no readable GGUF file.
        InconclusiveTrial: as `require_loadable`.
    """
    parts = parts_by_name(path)
    try:
        if all(_survived.get((part.absolute(), mtp)) == FileState.of(part) for part in parts):
            return
    except OSError:
        pass  # reading it says why
    require_loadable([read_header(part) for part in parts], mtp=mtp)


def _try_out(
    trial: str, header: GGUFHeader, beside: GGUFHeader | None, max_s: float, *, mtp: bool
) -> _Verdict:
    """Load the file in a child process."""
    request: dict[str, Any] = {
        "path": str(header.path.resolve()),
        "head": head_family(header) is not None,
        "mtp": mtp,
    }
    if beside is not None:
        request["beside"] = str(beside.path.resolve())
    verdict = attempt_in_child(
        trial,
        request,
        subject=_subject(header),
        cpu_s=max_s,
        stack_bytes=8 << 20,
    )
    if verdict.why == "time":
        return _Verdict("it does not finish")
    if verdict.answer is None:
        return _Verdict(verdict.detail)
    # What llama.cpp refuses, it will refuse again; but a model may be of use without further layers.
    error = str(verdict.answer.get("error", "")) if mtp else ""
    if error:
        return _Verdict(error.rstrip("."))
    return _Verdict("", tuple(verdict.answer.get("order", ())))


def _subject(header: GGUFHeader) -> str:
    return f"Loading {header.path}"


def _place(headers: Sequence[GGUFHeader], *, mtp: bool, trial: str = _TRIAL) -> Path:
    fingerprints = (header.fingerprint for header in headers)
    tried = [] if trial == _TRIAL else [trial]
    names = " ".join([build_identity(), *fingerprints, *["mtp"] * mtp, *_embeds(headers[0]), *tried])
    digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
    return CacheKind.TRIALS.folder / f"{digest}.json"


def _embeds(header: GGUFHeader) -> list[str]:
    """A mark for embedding models, which compute something else in the trial."""
    return [] if embedding_shape(header) is None else ["embeds"]


def _time_of(place: Path) -> str:
    """The time at which a verdict was saved; empty if there is none."""
    try:
        return f"{datetime.fromtimestamp(place.stat().st_mtime).astimezone():%Y-%m-%d at %H:%M}"
    except OSError:
        return ""
