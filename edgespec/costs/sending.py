"""Products with weights in memory beside a card: the processor computes them, or they are sent to the card.

A weight that is sent takes the time of the link, and then the card's own, which hardly grows with the rows of
a pass. So sending is faster from some number of rows on. Only weights as they are in the file can be sent;
with rearranged ones, the processor is faster. Which of the two is better depends on the rows of the passes.
Where rearranged ones are in memory, those of the file can be read again for passes of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.costs.curves import Curve
from edgespec.costs.layer_assignment import RemotePart

LARGEST = 512  # rows of the passes that are compared
NEVER = 1 << 62  # rows: no pass has so many
_NO_TRANSFER = Curve.through([(1, 0.0)])  # `seconds` count what is sent
_TELLING = (1, 2, 4, 8, 16, 32, 64, 128, 256, LARGEST)
_REREAD_FROM = 65  # rows at least: more than usual trees have, which do not depend on the disk then
_CLEARLY_FASTER = 1.15  # as other placements must be: what rearranged weights gain was measured more closely


@dataclass(frozen=True)
class HostCosts:
    """Seconds for each byte of the weights that stay in memory, by rows."""

    plain: Curve  # of the processor, with weights as they are in the file
    # of the processor, with rearranged weights; None if there are no kernels for them
    rearranged: Curve | None
    card: Curve  # of the card, with a weight that is there
    link_s: float  # of sending a byte to the card
    # of reading a byte from the model's file again; None if weights cannot be read again
    read_s: float | None = None

    @property
    def usual(self) -> Curve:
        """Seconds of the processor, in the layout that it would use."""
        return self.rearranged or self.plain

    def sent(self, rows: int) -> float:
        """Seconds with weights that are sent."""
        return self.link_s + self.card.at(rows)

    def reread(self, rows: int) -> float:
        """Seconds with weights that are read again and sent, after ggml has sent the rearranged ones."""
        assert self.read_s is not None
        return max(self.read_s, 2 * self.link_s + self.card.at(rows))


@dataclass(frozen=True)
class HostProducts:
    """The way of products with weights that stay in memory."""

    rearranged: bool  # whether the weights are rearranged for the processor
    sent_from: int  # the fewest rows of passes that weights are sent for; NEVER for none
    seconds: Curve  # for each byte, by rows
    usual: Curve  # the same, where the processor computes everything as it is fastest
    # whether those that are sent are read from the model's file, as rearranged ones are in memory
    rereads: bool = False

    @property
    def sends(self) -> bool:
        """True if weights are sent for passes of some size."""
        return self.sent_from != NEVER

    def part(self, share: float) -> RemotePart:
        """Their time in a pass, relative to a processor that computes everything.

        Args:
            share: of the model's bytes that they read.
        """
        slowness = {rows: self.seconds.at(rows) / self.usual.at(rows) for rows in self.seconds.rows}
        return RemotePart(share, slowness, _NO_TRANSFER, 0.0, 0.0)


def least_rows_sent(costs: HostCosts, processor: Curve) -> int:
    """The number of rows from which on sending weights is faster than the processor; NEVER if it is not.

    Args:
        processor: its seconds, in either layout.
    """
    return _least_rows(costs.sent, processor)


def _least_rows(there: Callable[[int], float], processor: Curve, first: int = 1) -> int:
    """The number of rows, at least `first`, from which on a card is faster; NEVER if it is not."""
    slower = [rows for rows in range(first, LARGEST + 1) if there(rows) >= processor.at(rows)]
    least = max(slower, default=first - 1) + 1
    return least if least <= LARGEST else NEVER


def _with_card(there: Callable[[int], float], processor: Curve, least: int) -> Curve:
    """Seconds on the processor, and on a card from this many rows on."""
    rows = {*_TELLING, least, max(least - 1, 1)}
    return Curve.through((n, there(n) if n >= least else processor.at(n)) for n in rows)


def plain_products(costs: HostCosts) -> HostProducts:
    """Products with weights as they are in the file, sent where that is faster."""
    least = least_rows_sent(costs, costs.plain)
    if least == NEVER:
        return HostProducts(False, NEVER, costs.plain, costs.usual)
    return HostProducts(False, least, _with_card(costs.sent, costs.plain, least), costs.usual)


def rearranged_products(costs: HostCosts) -> HostProducts:
    """Products with rearranged weights, and with those of the file for long passes where that is faster.

    There must be kernels for rearranged weights.
    """
    own = costs.usual
    least = NEVER if costs.read_s is None else _least_rows(costs.reread, own, _REREAD_FROM)
    if least == NEVER:
        return HostProducts(True, NEVER, own, own)
    return HostProducts(True, least, _with_card(costs.reread, own, least), own, rereads=True)


def choose_products(costs: HostCosts, speed: Callable[[Curve], float]) -> HostProducts:
    """The faster way for the passes that there will be.

    Args:
        speed: the tokens per second if the products take so many seconds for each byte.
    """
    plain = plain_products(costs)
    if costs.rearranged is None:
        return plain
    rearranged = rearranged_products(costs)
    return plain if speed(plain.seconds) > _CLEARLY_FASTER * speed(rearranged.seconds) else rearranged
