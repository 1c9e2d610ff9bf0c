"""The quality of a drafter on text of the target's that it has not learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.drafters.model import ModelDrafter
from edgespec.drafting.agreement import Agreement, AgreementMeter, CostModel, SampleAnswer
from edgespec.generation.config import GenerationConfig
from edgespec.llama.runtime.context import Context
from edgespec.llama.runtime.model import Model
from edgespec.machine.cores import default_threads
from edgespec.speculation.growth import TreeLimits
from edgespec.speculation.noise import GumbelNoise
from edgespec.speculation.policies import tree_policy

BUDGETS = (8, 16, 32)
_TEXTS, _TOKENS = 8, 48  # of the texts that trees are led along
_DEPTH = 16
_ROWS = 64
_SAME_SIZE = 0.02  # share by which equally shaped files may differ, in metadata


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a drafter."""

    path: Path
    agreement: Agreement
    step_s: float  # of a draft step of a few tokens
    n_bytes: int
    tokens_per_second: float  # that the target should reach with it, by its agreement and its step
    tokens_per_pass: dict[int, float]  # greedy, by nodes of a tree; empty if not measured

    def to_json(self) -> dict[str, Any]:
        """Return the fields for scripts."""
        return asdict(self) | {"path": str(self.path)}


def evaluate(
    path: Path, samples: Sequence[SampleAnswer], cost: CostModel, like: Evaluation | None = None
) -> Evaluation:
    """Measure agreement and step of a drafter.

    Args:
        like: a drafter that was measured before. If this one has the same size, it takes as long: what two
            measurements of one time differ by must not decide.
    """
    n_bytes = path.stat().st_size
    with AgreementMeter(path, samples) as meter:
        agreement = meter.agreement(samples)
        same = like is not None and abs(like.n_bytes - n_bytes) < _SAME_SIZE * n_bytes
        step_s = like.step_s if like is not None and same else meter.step_s()
    return Evaluation(
        path, agreement, step_s, n_bytes, cost.tokens_per_second(agreement, step_s, n_bytes), {}
    )


def tokens_per_pass(
    path: Path, samples: Sequence[SampleAnswer], budgets: Sequence[int] = BUDGETS
) -> dict[int, float]:
    """Tokens that each pass of the target would add with trees of so many nodes, drafted for greedy texts.

    Only the drafter runs: the texts are known, so what the target would accept of a tree is known too.

    Of the first few texts, only the beginnings count.
    """
    samples = [SampleAnswer(sample.prompt, sample.answer[:_TOKENS]) for sample in samples[:_TEXTS]]
    longest = max(len(sample.prompt) + len(sample.answer) for sample in samples)
    found = {}
    with Model(path, several_sequences=True) as model:
        context = Context(
            model,
            n_cells=longest + 8 * max(budgets) + _ROWS,
            n_rows=_ROWS,
            n_outputs=_ROWS,
            n_sequences=_ROWS,
            n_threads=default_threads(),
        )
        drafter = ModelDrafter(model, context, model.vocabulary.n_tokens)
        for budget in budgets:
            passes = sum(_passes(drafter, sample, budget) for sample in samples)
            found[budget] = sum(len(sample.answer) for sample in samples) / passes
        context.close()
    return found


def _passes(drafter: ModelDrafter, sample: SampleAnswer, budget: int) -> int:
    """Passes in which the target would write a sample, with trees of this size and nothing learned before."""
    config, policy = GenerationConfig(), tree_policy()
    limits = policy.clamp(TreeLimits(budget, depth=_DEPTH, width=max(8, budget // 8)))
    limits = replace(limits, expansion=policy.expansion(config))
    ranking = policy.ranking(config, GumbelNoise(0, 1))
    tokens, ahead = list(sample.prompt), list(sample.answer)
    passes = 0
    while ahead:
        tree = drafter.draft(tokens, limits, ranking)
        node: int | None = 0
        while node is not None and ahead:
            node = tree.child(node, ahead[0])
            tokens.append(ahead.pop(0))  # accepted, or in the end the target's own choice
        drafter.learn(tokens)
        passes += 1
    return passes
