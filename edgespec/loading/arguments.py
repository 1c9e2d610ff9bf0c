"""The arguments of `edgespec.load`: the types of the options, their documentation, and checks of both."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

from edgespec.base.progress import Progress
from edgespec.config import OPTIONS, Config


class LoadArguments(TypedDict, total=False):
    """The arguments of `edgespec.load` besides the model, and the types that they may have."""

    context: int
    kv: str
    lora: Sequence[str]
    mmproj: str | os.PathLike[str] | None
    images: bool
    memory: int | str | None
    offload: str
    pack: str
    pack_dir: Sequence[str | os.PathLike[str]]
    slots: int | None
    experts: str
    prompt_cache: bool
    prompt_cache_size: int | str
    threads: int | None
    gpu_layers: int | str
    device: str | Sequence[str]
    draft_device: str
    workers: Sequence[str]
    leave_out_missing: bool
    draft: str | os.PathLike[str]
    drafter: str | None
    draft_from: str | os.PathLike[str] | None
    reuse_answers: bool
    draft_window: int | None
    learn: bool
    tree: str
    tree_budget: int | None
    tree_depth: int | None
    tree_width: int | None
    exact: bool | None
    parallel: int | str | None
    text_tokens: int | None


_Load = TypeVar("_Load", bound=Callable[..., Any])
_TYPES = {"model": str | os.PathLike[str] | None, **get_type_hints(LoadArguments)}
_WIDTH = 100  # columns


def takes_options(load: _Load) -> _Load:
    """Show the options of a function that takes `LoadArguments` in its signature and its documentation."""
    types = {**_TYPES, "on_progress": Progress | None}
    kinds = {"model": inspect.Parameter.POSITIONAL_OR_KEYWORD}
    load.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                kinds.get(name, inspect.Parameter.KEYWORD_ONLY),
                default=OPTIONS[name].default if name in OPTIONS else None,
                annotation=hint,
            )
            for name, hint in types.items()
        ]
    )
    load.__annotations__ = {**types, "return": load.__annotations__["return"]}
    options = "\n".join(map(_described, types))
    load.__doc__ = inspect.cleandoc(load.__doc__ or "").replace("    {options}", options)
    return load


def checked_config(arguments: dict[str, Any]) -> Config:
    """The configuration that arguments of `edgespec.load` ask for.

    Raises:
        TypeError: there is no such argument.
    """
    for name in arguments:
        if name not in _TYPES:
            raise TypeError(f"load() got an unexpected keyword argument '{name}'")
    config = Config.of(**arguments)
    config.check()
    return config


def documentation(name: str) -> str:
    """The description of an argument, which names arguments where `--help` names flags."""
    if name == "on_progress":
        return "Called with what is being done and the fraction done."
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), OPTIONS[name].documentation)


def _described(name: str) -> str:
    return textwrap.fill(
        f"{name}: {documentation(name)}",
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )
