"""Searches for the drafter that makes its target fastest: which layers to drop, and how few bits to use.

First, every quantization is tried with all layers. In the best one, each layer is dropped alone, and the loss
of agreement is its importance. Then layers are dropped one after another, as long as the expected speed grows
or the memory limit requires it. Importances do not add up, so each time the few least important layers
are measured together with those already dropped, and the least harmful one goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.costs.pass_time import even_draft_seconds, pass_seconds, read_seconds, round_seconds
from edgespec.drafting.agreement import Agreement
from edgespec.llama.quantize import KEEP
from edgespec.progress import Progress

_TRIED = 4  # of the least important layers, measured together with those already dropped
_PATIENCE = 3  # steps in a row without improvement
_DEEPEST = 16


@dataclass(frozen=True, order=True)
class Recipe:
    """The changes that make a drafter from its target."""

    quantization: str
    dropped: tuple[int, ...] = ()

    def __str__(self) -> str:
        base = "the target's own types" if self.quantization == KEEP else self.quantization
        if not self.dropped:
            return base
        plural = "s" if len(self.dropped) > 1 else ""
        return f"{base} without layer{plural} {', '.join(map(str, self.dropped))}"


class Measurements(Protocol):
    """Measurements of a recipe that need no file made by it."""

    def agreement(self, recipe: Recipe) -> Agreement: ...
    def step_s(self, recipe: Recipe) -> float: ...
    def n_bytes(self, recipe: Recipe) -> int: ...


@dataclass(frozen=True)
class CostModel:
    """The speed of a target with a drafter.

    Attributes:
        pass_s: seconds of a target pass over a tree.
        read_rate: bytes per second at which a streamed target is read; 0 if it is in memory. What the drafter
            takes of the memory must be read from disk in every pass.
        limit: most bytes a drafter may have; None has no limit.
        read_s: seconds of a pass during which the disk reads; None if it reads all the time. If arithmetic
            takes longer, more can be read at no cost.
    """

    pass_s: float
    read_rate: float = 0.0
    limit: int | None = None
    read_s: float | None = None

    def tokens_per_second(self, agreement: Agreement, step_s: float, n_bytes: int) -> float:
        """Expected speed with trees of the best depth.

        A level of the tree holds the target's choice if the drafter's first choice is right, and about half
        of the time if only one of its first four is. 0 if the drafter is too large.
        """
        if self.limit is not None and n_bytes > self.limit:
            return 0.0
        level = (agreement.top1 + agreement.top4) / 2
        pass_s = self.pass_s
        if self.read_rate:
            read_s = pass_s if self.read_s is None else self.read_s
            pass_s = pass_seconds(read_s + read_seconds(n_bytes, self.read_rate), pass_s)
        expected, reached, best = 1.0, 1.0, 0.0
        for depth in range(1, _DEEPEST + 1):
            reached *= level
            expected += reached
            draft_s = even_draft_seconds(step_s, 0.0, steps=depth, rows=depth)
            best = max(best, expected / round_seconds(draft_s, pass_s))
        return best


@dataclass(frozen=True)
class EvaluatedRecipe:
    """A recipe, its measurements and its expected speed."""

    recipe: Recipe
    agreement: Agreement
    step_s: float
    n_bytes: int
    tokens_per_second: float


def search(
    measurements: Measurements,
    quantizations: Sequence[str],
    n_layers: int,
    cost: CostModel,
    on_progress: Progress | None = None,
) -> EvaluatedRecipe:
    """The best recipe found, other than the target as it is.

    If none is within the limit, the smallest one that was tried.
    """

    def evaluate(recipe: Recipe) -> EvaluatedRecipe:
        agreement = measurements.agreement(recipe)
        step_s, n_bytes = measurements.step_s(recipe), measurements.n_bytes(recipe)
        speed = cost.tokens_per_second(agreement, step_s, n_bytes)
        return EvaluatedRecipe(recipe, agreement, step_s, n_bytes, speed)

    def report(what: str, fraction: float) -> None:
        if on_progress is not None:
            on_progress(what, fraction)

    whole = []
    for number, quantization in enumerate(quantizations):
        report(f"Trying {Recipe(quantization)}", 0.2 * number / len(quantizations))
        whole.append(evaluate(Recipe(quantization)))
    best = _best(whole)
    base = best.recipe.quantization
    harm = {}
    for layer in range(n_layers):
        report(f"Trying {base} without layer {layer}", 0.2 + 0.5 * layer / n_layers)
        harm[layer] = evaluate(Recipe(base, (layer,)))
    order = sorted(harm, key=lambda layer: (-_level(harm[layer].agreement), layer))
    gone: tuple[int, ...] = ()
    tried = [evaluated for evaluated in whole if not _is_target(evaluated.recipe)]
    stale = 0
    while stale < _PATIENCE and len(gone) < n_layers - 1:
        so_far = f"; best so far: {_best(tried).recipe}" if tried else ""
        report(f"Leaving out {len(gone) + 1} layers{so_far}", 0.7 + 0.2 * len(gone) / n_layers)
        left = [layer for layer in order if layer not in gone][:_TRIED]
        step = [
            harm[layer] if not gone else evaluate(Recipe(base, tuple(sorted((*gone, layer)))))
            for layer in left
        ]
        # While all of them are still above the limit, the one that agrees best is taken.
        picked = max(step, key=lambda j: (j.tokens_per_second, _level(j.agreement)))
        gone = picked.recipe.dropped
        improved = not tried or picked.tokens_per_second > _best(tried).tokens_per_second
        too_large = cost.limit is not None and picked.n_bytes > cost.limit
        stale = 0 if improved or too_large else stale + 1
        tried += step
    best = _best(tried or whole)
    for quantization in quantizations:
        if quantization != base and best.recipe.dropped:
            report(f"Trying {Recipe(quantization, best.recipe.dropped)}", 0.95)
            tried.append(evaluate(Recipe(quantization, best.recipe.dropped)))
    return _best(tried or whole)


def _is_target(recipe: Recipe) -> bool:
    """Check that nothing is changed: a target that fits in memory twice needs no such drafter."""
    return recipe.quantization == KEEP and not recipe.dropped


def _best(evaluated: Sequence[EvaluatedRecipe]) -> EvaluatedRecipe:
    return max(evaluated, key=lambda recipe: (recipe.tokens_per_second, -recipe.n_bytes))


def _level(agreement: Agreement) -> float:
    return (agreement.top1 + agreement.top4) / 2
