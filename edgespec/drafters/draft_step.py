"""The part of a draft step that concerns one text."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.drafters.drafted_text import DraftedText
from edgespec.models.llama.runtime.batch import Batch
from edgespec.speculation.growth import Frontier


@dataclass
class DraftStep:
    """One text's nodes in a draft step.

    Attributes:
        rows: which nodes of the frontier are read.
        batch: the rows that are decoded; None if there are none.
    """

    text: DraftedText
    frontier: Frontier
    batch: Batch | None = None

    def __post_init__(self) -> None:
        self.rows: list[int] = [0]

    @property
    def n_outputs(self) -> int:
        """Rows of the batch whose logits are computed; the nodes' are the last of them."""
        return self.batch.n_outputs if self.batch is not None else 0

    @property
    def reads_text(self) -> bool:
        """Whether this step reads the text up to the root, instead of nodes below it."""
        return bool(self.frontier.nodes[0] == 0)

    def prepare(self, most_pending: int) -> None:
        """Set the rows to decode; of long pending text only the last tokens are left to them."""
        if self.reads_text:
            self.text.read_pending(most_pending)
            self.batch = self.text.pending_batch()
        else:
            self.rows, self.batch = self.text.branch_batch(self.frontier)
