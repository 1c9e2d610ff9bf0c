"""The products with weights that no card holds: by the processor, or sent to a card from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.config import Config
from edgespec.costs.curves import Curve
from edgespec.costs.pass_time import USUAL_OVERLAP
from edgespec.costs.planned_weights import PlannedWeights
from edgespec.costs.planner import USUAL_OVERHEAD, DraftingCosts, TargetPasses, alternatives, best
from edgespec.costs.prompts import USUAL_ANSWER
from edgespec.costs.sending import LARGEST, HostCosts, HostProducts, choose_products
from edgespec.costs.yields import USUAL_AGREEMENT, expected_yields
from edgespec.kernels.layouts import measured_products
from edgespec.kernels.native.offload import can_be_set
from edgespec.kernels.report import ROWS
from edgespec.models.gguf.experts import layer_weights
from edgespec.models.gguf.footprint import USUAL_NODES
from edgespec.models.gguf.layers import Layer, ModelFiles
from edgespec.planning.devices.assignment import LayerAssignment, layer_tensors, usual_type
from edgespec.planning.devices.cards import Card, Cards
from edgespec.planning.memory.stream_layout import streamable

_QUESTION = USUAL_ANSWER  # tokens that a turn adds to a conversation before its answer


def host_products(
    assignment: LayerAssignment,
    cards: Cards,
    target: ModelFiles,
    drafter: ModelFiles | None,
    config: Config,
    *,
    drafter_elsewhere: bool,
    holding: PlannedWeights | None = None,
    read_rate: float = 0.0,
    rereads: bool = False,
    most: int = USUAL_NODES,
) -> HostProducts | None:
    """The way of products with weights that no card holds; None if there is no choice.

    Args:
        drafter_elsewhere: the drafter is on a card.
        holding: the places of these weights; None if all are in memory.
        read_rate: bytes per second that the disk reads; 0 if unknown.
        rereads: weights that are in memory may be read from the model's file again.
        most: nodes of a tree.
    """
    holding = holding or PlannedWeights(0, 0, target.tensor_bytes)
    streams = holding.streamed_bytes > 0
    (card, _), *_ = assignment.used(cards.devices)
    here = sum(t.n_bytes for layer in layer_tensors(target) for t in layer) - assignment.lent_bytes
    if not here or card.shared or not can_be_set():
        return None
    # Exact decoding finds its rule with the processor's own kernels. And of a mixture, only experts that the
    # rows of a pass need are sent, which depends on the text.
    if config.speculation.exact or layer_weights(target).experts:
        return None
    packs = config.memory.pack == "always" or config.memory.pack_dir  # what is packed is rearranged
    if streams and (packs or not read_rate):
        return None
    costs = host_costs(card, usual_type(target), _usual_matrix(target))
    if rereads and read_rate and not streams:
        costs = replace(costs, read_s=1 / read_rate)
    step_s = costs.card if drafter_elsewhere else costs.usual
    drafting = _drafting(config, drafter, step_s)
    read_s = holding.streamed_bytes / read_rate if streams else 0.0

    def speed(seconds: Curve) -> float:
        """Tokens per second of a usual answer, with what reading its question takes."""

        def pass_s(rows: int) -> float:
            return here * seconds.at(rows) + assignment.lent_bytes * costs.card.at(rows)

        compute = Curve.through((rows, pass_s(rows)) for rows in seconds.rows)
        passes = TargetPasses(compute, read_rate, overlap=USUAL_OVERLAP)
        speed = best(alternatives(holding, passes, drafting, most)).tokens_per_second
        question_s = passes.seconds(holding, read_s, pass_s(_QUESTION))
        return USUAL_ANSWER / (USUAL_ANSWER / speed + question_s)

    return choose_products(costs, speed)


def host_layers(target: ModelFiles, assignment: LayerAssignment) -> tuple[Layer, ...]:
    """The parts of a target's layers that no device holds."""
    return streamable(target, "never").without(assignment.names).layers


def copied_bytes(target: ModelFiles) -> int:
    """Bytes of a card's memory for the copies of weights that are sent: ggml makes one at a time."""
    return max(t.n_bytes for layer in layer_tensors(target) for t in layer)


def host_costs(card: Card, type_id: int, matrix: int) -> HostCosts:
    """The costs of weights in memory beside a card, as they were measured.

    Args:
        type_id: ggml's number of their quantization.
        matrix: bytes of a matrix of usual size.
    """
    measured, own_seconds, rearranged = measured_products(type_id), card.profile.own_seconds, None
    if measured is not None and measured[0] != measured[1]:
        shares = (there / plain for there, plain in zip(*measured, strict=True))
        rearranged = _curve([own * share for own, share in zip(own_seconds, shares, strict=True)])
    link_s = card.transfer.at(matrix) / 2 / matrix  # there and back was measured
    return HostCosts(_curve(own_seconds), rearranged, _curve(card.seconds), link_s)


def _curve(seconds: Sequence[float]) -> Curve:
    """Seconds by rows, up to those of the largest passes."""
    return Curve.through(zip(ROWS, seconds, strict=True)).reaching(LARGEST)


def _usual_matrix(files: ModelFiles) -> int:
    """Bytes of a matrix of usual size; the larger half of them has most of the weights."""
    sizes = sorted(t.n_bytes for layer in layer_tensors(files) for t in layer if len(t.shape) > 1)
    return sizes[len(sizes) * 3 // 4]


def _drafting(config: Config, drafter: ModelFiles | None, step_s: Curve) -> DraftingCosts:
    """Drafting as far as it is known before anything is loaded.

    Args:
        step_s: seconds for a byte of the drafter's weights.
    """
    if not config.speculation.drafts:
        return DraftingCosts("none")
    yields = expected_yields(USUAL_AGREEMENT)
    if drafter is None:
        return DraftingCosts("lookup", yields)
    return DraftingCosts("drafter", yields, step_s.scaled(drafter.tensor_bytes), USUAL_OVERHEAD)


def describe_host_products(products: HostProducts, *, streams: bool = False) -> str:
    """The choice in a sentence.

    Args:
        streams: some of the weights are read from disk.
    """
    weights = "weights in memory and from disk" if streams else "weights in memory"
    if products.rereads:
        return (
            f"The processor computes with the {weights}, which are rearranged for it. For passes of "
            f"{products.sent_from} rows or more, they are read from the model's file and sent to the card."
        )
    if products.rearranged:
        return f"The processor computes with the {weights}, which are rearranged for it."
    if not products.sends:
        return f"The processor computes with the {weights}, as they are in the file."
    if products.sent_from == 1:
        return f"{weights.capitalize()} are sent to the card in every pass."
    return f"{weights.capitalize()} are sent to the card for passes of {products.sent_from} rows or more."
