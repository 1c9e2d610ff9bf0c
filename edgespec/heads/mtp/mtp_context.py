"""The contexts of layers for multi-token prediction."""

from __future__ import annotations

from edgespec.heads.shared.head_context import HeadContext


class MTPContext(HeadContext):
    """A context of a model's own layers for multi-token prediction.

    Their features are the model's last states, which it shows as they are. `beside` is None, and the model is
    the target or a file of these layers, loaded with them.
    """
