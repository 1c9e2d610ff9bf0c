"""A repr for dataclasses with many fields: those that differ from their defaults."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def short_repr(self: Any) -> str:
    """Format as GenerationConfig(max_tokens=32, temperature=0.8); to be assigned to `__repr__`."""
    shown = []
    for field in fields(self):
        value = getattr(self, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default:
            shown.append(
                f"{field.name}={value:.4g}" if isinstance(value, float) else f"{field.name}={value!r}"
            )
    return f"{type(self).__name__}({', '.join(shown)})"
