"""Conversion of plain option values without Pydantic.

Typer converts all values by Pydantic, with an adapter for each option, given or not. That takes longer than
all else before a command begins, and most values are text or missing.
"""

from __future__ import annotations

import re
from typing import Any

_PLAIN = {
    str: re.compile("[^\ud800-\udfff]*"),  # Pydantic refuses bytes that are no text
    int: re.compile("[0-9]{1,18}"),
    float: re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?"),
}


def convert_plainly(parameter: Any) -> None:
    """Have a parameter of a Typer command convert missing values, texts and plain numbers by itself."""
    if parameter.required or "process_value" in vars(parameter):  # once is enough
        return
    convert, typed = parameter.process_value, parameter.type_descriptor.annotation
    info, several = parameter.type_descriptor.parameter_info, parameter.multiple or parameter.nargs == -1
    plain = None if info.parser or (info.min, info.max) != (None, None) else _PLAIN.get(typed)

    def process_value(context: Any, value: Any) -> Any:
        if value is None:
            value = () if several else None
        elif plain is not None and isinstance(value, str) and plain.fullmatch(value):
            value = typed(value)
        elif type(value) is not typed:
            return convert(context, value)
        return parameter.callback(context, parameter, value) if parameter.callback else value

    parameter.process_value = process_value
