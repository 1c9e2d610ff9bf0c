"""The drafters that a model could have here, with their costs and yields: measured, derived or assumed."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config import LOOKUP, NONE
from edgespec.costs.curves import Curve
from edgespec.costs.planner import USUAL_OVERHEAD, DraftingCosts
from edgespec.costs.yields import USUAL_AGREEMENT, TreeYields, expected_yields
from edgespec.heads.block import BlockHead
from edgespec.heads.families import head_of
from edgespec.heads.mtp import MTP_NAME
from edgespec.models.gguf.layers import ModelFiles, MTPLayers
from edgespec.models.gguf.vocabulary import another_vocabulary
from edgespec.models.hub.drafter_choice import agreement_of
from edgespec.models.hub.inspection import InspectedModel
from edgespec.planning.plan import Plan
from edgespec.planning.report.target_passes import PassCosts
from edgespec.profiles.store import ProfileKeys, ProfileStore

_LOOKUP_NAME = "prompt lookup"
_LOOKUP_AGREEMENT = 0.2
_USUAL_TRANSLATED = 0.5  # agreement of a drafter with another vocabulary
_WIDTH = 8


class DraftCosts:
    """Drafting for one target, on this machine.

    Args:
        threads: of the drafter.
        temperature: at which the target samples.
    """

    def __init__(
        self,
        target: InspectedModel,
        store: ProfileStore,
        pass_costs: PassCosts,
        threads: int,
        temperature: float,
    ) -> None:
        self._target = target
        self._store = store
        self._pass_costs = pass_costs
        self._threads = threads
        self._temperature = temperature

    def of_load(self, drafter: ModelFiles | None, draft: str) -> DraftingCosts:
        """Drafting as a load does it.

        The yield of prompt lookup depends on the text. Until it was measured it is a guess, which is shown
        only to a person who asks for prompt lookup.

        Args:
            drafter: its model, if it has one.
            draft: as for loading: "auto", "none", "lookup", "mtp", or the name of a model.
        """
        if drafter is not None:
            return self.of_model(drafter, draft)
        if draft == NONE:
            return DraftingCosts(NONE)
        yields = self._yields(LOOKUP)
        if yields is not None:
            return DraftingCosts(_LOOKUP_NAME, yields, source="measured on this machine")
        if draft == LOOKUP:
            guess = expected_yields(_LOOKUP_AGREEMENT)
            source = "an estimate: the yield depends on the text"
            return DraftingCosts(_LOOKUP_NAME, guess, source=source, measured=False)
        source = "not known, as the yield depends on the text; the speed is that without drafts"
        return DraftingCosts(_LOOKUP_NAME, source=source)

    def on_device(self, drafting: DraftingCosts, plan: Plan) -> DraftingCosts:
        """A drafter on a device: as measured there, or derived from its steps on the processor."""
        if plan.drafter is None or not plan.on_cards.drafter_name or drafting.step is None:
            return drafting
        fingerprint = plan.drafter.headers[0].fingerprint
        steps = self._store.drafts(self._keys(fingerprint, plan.on_cards.drafter_name).drafts)
        if steps is None:
            return replace(drafting, step=plan.draft_steps(drafting.step), measured=False)
        measured = self._yields(fingerprint) is not None
        return replace(drafting, step=steps.step, overhead=steps.overhead, measured=measured)

    def of_model(self, files: ModelFiles, draft: str = "") -> DraftingCosts:
        """Drafting with a model, a head of the target, or its layers for further tokens.

        Args:
            draft: its name where it is not on this machine.
        """
        header, target = files.headers[0], ModelFiles.of_headers(self._target.headers)
        head = head_of(files)
        multiplied = files if head is None else head.multiplied(files, target)
        if isinstance(files, MTPLayers):
            return self._of_model(files, MTP_NAME, None, multiplied)
        here = header.path.exists()
        name = header.path.name if here else draft
        top1 = agreement_of(target.headers[0], header.path) if here and self._target.path else None
        if head is not None:
            name = f"{name} ({head.role})"
        drafting = self._of_model(files, name, top1, multiplied)
        return _in_one_pass(drafting, head) if isinstance(head, BlockHead) else drafting

    def _of_model(
        self, model: ModelFiles, name: str, top1: float | None, multiplied: ModelFiles
    ) -> DraftingCosts:
        """Drafting with a model, or a part of one.

        Args:
            multiplied: the weights that a draft step multiplies by.
        """
        fingerprint = model.headers[0].fingerprint
        steps = self._store.drafts(self._keys(fingerprint).drafts)
        yields = self._yields(fingerprint)
        usual = USUAL_AGREEMENT
        if yields is not None:
            source = "measured on this machine with this pair"
        elif top1 is not None:
            source = f"derived from this pair's agreement on {top1:.0%} of tokens, measured on this machine"
        else:
            kind = ""
            if another_vocabulary(self._target.headers[0], model.headers[0]):
                usual, kind = _USUAL_TRANSLATED, " where the vocabularies differ"
            source = (
                f"assumed for a typical agreement on {usual:.0%} of tokens{kind} "
                "('edgespec models pair' measures it)"
            )
        return DraftingCosts(
            name=name,
            yields=yields or expected_yields(usual if top1 is None else top1),
            step=steps.step if steps else self._pass_costs.derived_curve(multiplied),
            overhead=steps.overhead if steps else USUAL_OVERHEAD,
            width=_WIDTH,
            source=source,
            measured=yields is not None and steps is not None,
        )

    def _keys(self, drafter: str, device: str = "") -> ProfileKeys:
        target = self._target.headers[0].fingerprint
        return ProfileKeys.of(target, drafter, threads=self._threads, mode="", drafter_device=device)

    def _yields(self, drafter: str) -> TreeYields | None:
        """Tokens a pass with trees of the pair at this temperature; None if they were not measured."""
        return self._store.yields_at(self._keys(drafter), self._temperature)


def _in_one_pass(drafting: DraftingCosts, head: BlockHead) -> DraftingCosts:
    """The costs of a head that drafts a whole tree in one pass; measured costs are kept."""
    assert drafting.yields is not None
    assert drafting.step is not None
    if drafting.measured:
        return drafting
    once = dict.fromkeys(drafting.yields.steps, 1.0)
    step = Curve.through([(1, drafting.step.at(head.block_size))])
    return replace(drafting, yields=replace(drafting.yields, steps=once, rows=once), step=step)
