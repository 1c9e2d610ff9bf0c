"""The drafters that a model could have here, with their costs and yields: measured, derived or assumed."""

from __future__ import annotations

from dataclasses import replace

from edgespec.config import NO_MODEL
from edgespec.costs.curves import Curve
from edgespec.costs.planner import DraftingCosts
from edgespec.costs.yields import TreeYields, expected_yields
from edgespec.errors import EdgeSpecError
from edgespec.loading.plan import Plan
from edgespec.models.gguf.heads.assistant import is_assistant
from edgespec.models.gguf.heads.block import BlockHead, read_any_head
from edgespec.models.gguf.heads.eagle import is_head
from edgespec.models.gguf.heads.mtp import MTP_NAME, mtp_fault, require_mtp, with_output
from edgespec.models.gguf.heads.mtp_file import is_mtp_file, read_mtp_file
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub.drafter_choice import agreement_of, candidates
from edgespec.models.hub.inspection import InspectedModel, inspect_model
from edgespec.plans.pass_costs import PassCosts
from edgespec.profiles.store import ProfileKeys, ProfileStore
from edgespec.progress import Progress

_USUAL_AGREEMENT, _LOOKUP_AGREEMENT = 0.7, 0.2
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

    def of_drafters(self, draft: str, on_progress: Progress) -> list[tuple[DraftingCosts, ModelFiles | None]]:
        """The drafters to compare, each with its model if it has one.

        The yield of prompt lookup depends on the text. Until it was measured it is a guess, and nothing
        is compared with a guess unless a person asks for prompt lookup.

        Args:
            draft: as for loading: "auto", "none", "lookup", "mtp", or the name of a model.

        Raises:
            EdgeSpecError: the named drafter cannot be found.
        """
        target, files = self._target, ModelFiles.of_headers(self._target.headers)
        if draft == "none":
            return []
        found: list[tuple[DraftingCosts, ModelFiles | None]] = []
        if draft == "mtp" or (draft == "auto" and not mtp_fault(files)):
            layers = require_mtp(files)
            found.append((self._of_model(layers, MTP_NAME, None, with_output(layers, files)), layers))
        if draft not in NO_MODEL:
            model = inspect_model(draft, on_progress)
            top1 = agreement_of(target.headers[0], model.path) if target.path and model.path else None
            found.append(self._named(model, draft, top1))
        elif draft == "auto":
            for candidate in candidates(target.headers[0]) if target.path else ():
                try:
                    model = inspect_model(str(candidate.path))
                except EdgeSpecError:
                    continue
                found.append(self._named(model, draft, candidate.top1))
        lookup = self._of_lookup()
        if lookup.measured or draft == "lookup":
            found.append((lookup, None))
        return found

    def on_device(self, drafting: DraftingCosts, model: ModelFiles, plan: Plan) -> DraftingCosts:
        """A drafter on a device: as measured there, or derived from its steps on the processor."""
        if not plan.on_cards.drafter_name or drafting.step is None:
            return drafting
        fingerprint = model.headers[0].fingerprint
        steps = self._store.drafts(self._keys(fingerprint, plan.on_cards.drafter_name).drafts)
        if steps is None:
            return replace(drafting, step=plan.draft_steps(drafting.step), measured=False)
        measured = self._yields(fingerprint) is not None
        return replace(drafting, step=steps.step, overhead=steps.overhead, measured=measured)

    def _of_lookup(self) -> DraftingCosts:
        yields = self._yields("lookup")
        source = "measured on this machine" if yields else "a guess, as the yield depends on the text"
        return DraftingCosts(
            "prompt lookup",
            yields or expected_yields(_LOOKUP_AGREEMENT),
            source=source,
            measured=yields is not None,
        )

    def _named(
        self, model: InspectedModel, draft: str, top1: float | None
    ) -> tuple[DraftingCosts, ModelFiles]:
        files = ModelFiles.of_headers(model.headers)
        name = model.path.name if model.path else draft
        if is_mtp_file(model.headers[0]):
            files, name = read_mtp_file(model.headers), f"{name} ({MTP_NAME})"
            return self._of_model(files, name, top1, files), files
        if not is_head(model.headers[0]):
            drafting = self._of_model(files, name, top1, files)
            if model.approximate:
                drafting = replace(drafting, source=f"{drafting.source}; its size is approximate")
            return drafting, files
        if is_assistant(model.headers[0]):
            return self._of_model(files, f"{name} (assistant)", top1, files), files
        head = read_any_head(model.headers[0])
        multiplied = files
        if head.borrows_output:
            multiplied = with_output(files, ModelFiles.of_headers(self._target.headers))
        drafting = self._of_model(files, f"{name} (head)", top1, multiplied)
        return (_in_one_pass(drafting, head) if isinstance(head, BlockHead) else drafting), files

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
        if yields is not None:
            source = "measured on this machine with this pair"
        elif top1 is not None:
            source = f"derived from this pair's agreement on {top1:.0%} of tokens, measured on this machine"
        else:
            source = (
                f"assumed for a typical agreement on {_USUAL_AGREEMENT:.0%} of tokens "
                "('edgespec models pair' measures it)"
            )
        return DraftingCosts(
            name=name,
            yields=yields or expected_yields(_USUAL_AGREEMENT if top1 is None else top1),
            step=steps.step if steps else self._pass_costs.derived_curve(multiplied),
            overhead=steps.overhead if steps else 1.1,
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
    """Drafting with a head of which one pass gives a whole tree; what was measured stays."""
    assert drafting.yields is not None
    assert drafting.step is not None
    if drafting.measured:
        return drafting
    once = dict.fromkeys(drafting.yields.steps, 1.0)
    step = Curve.through([(1, drafting.step.at(head.block_size))])
    return replace(drafting, yields=replace(drafting.yields, steps=once, rows=once), step=step)
