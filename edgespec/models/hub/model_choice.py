"""Chooses a model from a repository: the exact quantization, or the nearest one, with a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.base.units import readable
from edgespec.errors import UsageError, similar
from edgespec.models.hub.names import HubName, ModelVariant, bits_of, is_known_label, normal

_USUAL = "Q4_K_M"  # the usual choice


@dataclass(frozen=True)
class ChosenModel:
    """The model that was picked, and why, if that is not obvious."""

    model: ModelVariant
    note: str = ""


def choose_model(name: HubName, models: Sequence[ModelVariant]) -> ChosenModel:
    """Pick the model that `name` means; `models` must not be empty.

    A file name picks that file. A quantization picks the file that has it, or else the nearest one by bits
    per weight; of two equally near, the larger. No quantization means Q4_K_M.

    Raises:
        UsageError: several files match, or the name is not a quantization; lists
            the available ones, with sizes.
    """
    if len(models) == 1 and name.pick is None:
        return ChosenModel(models[0])
    wanted = name.pick or _USUAL
    by_file = [m for m in models if wanted in (m.name, m.paths[0]) or wanted in m.paths]
    exact = by_file or _exact(wanted, models)
    if len(exact) == 1:
        return ChosenModel(exact[0])
    if exact:
        raise UsageError(
            f"{name.repo} has {len(exact)} files of quantization {wanted}: {listing(exact, names=True)}.",
            f"Name one: {name.repo}:{exact[0].name}",
        )
    if not is_known_label(wanted):
        return _by_beginning(name, wanted, models)
    labelled = [m for m in models if bits_of(m.label)]
    if not labelled:
        raise UsageError(
            f"The file names of {name.repo} contain no quantization: {listing(models, names=True)}.",
            f"Name one: {name.repo}:{models[0].name}",
        )
    best = min(_distance(m, wanted) for m in labelled)
    nearest = [m for m in labelled if _distance(m, wanted) == best]
    picked = max(nearest, key=lambda m: m.n_bytes)
    said = "" if name.pick is None and normal(picked.label) == normal(_USUAL) else picked.label
    asked = f"There is no {wanted} in {name.repo}" if name.pick else f"{name.repo} has no {_USUAL}"
    return ChosenModel(picked, f"{asked}; {said} is the nearest{_size(picked)}." if said else "")


def listing(models: Sequence[ModelVariant], *, names: bool = False) -> str:
    """The models in one line, with their sizes."""
    return ", ".join(
        f"{m.name if names or not m.label else m.label}{_size(m)}"
        for m in sorted(models, key=lambda m: (m.n_bytes, m.name))
    )


def _size(model: ModelVariant) -> str:
    return f" ({readable(model.n_bytes)})" if model.n_bytes else ""  # some mirrors give no sizes


def _exact(wanted: str, models: Sequence[ModelVariant]) -> list[ModelVariant]:
    same = [m for m in models if m.label.upper() == wanted.strip().upper()]
    return same or [m for m in models if m.label and normal(m.label) == normal(wanted)]


def _by_beginning(name: HubName, wanted: str, models: Sequence[ModelVariant]) -> ChosenModel:
    """The beginning of a quantization, such as q4, picks the only model that has it."""
    begun = [m for m in models if normal(m.label).startswith(normal(wanted))] if normal(wanted) else []
    if len(begun) == 1:
        return ChosenModel(begun[0], f"{wanted} is {begun[0].label}{_size(begun[0])} here.")
    if begun:
        raise UsageError(
            f"'{wanted}' fits several quantizations of {name.repo}: {listing(begun)}.",
            f"Name one: {name.repo}:{begun[0].label}",
        )
    labels = {m.label for m in models if m.label}
    close = similar(wanted, labels)
    raise UsageError(
        f"{name.repo} has no '{wanted}'. It has: {listing(models)}.",
        f"Did you mean {name.repo}:{close[0]}?" if close else "Name one of these.",
    )


def _distance(model: ModelVariant, wanted: str) -> float:
    return round(abs(bits_of(model.label) - bits_of(wanted)), 3)
