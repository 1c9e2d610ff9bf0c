"""Arguments without a flag: a model, a prompt, or both.

    edgespec generate "Why is the sky blue?"
    edgespec generate big.gguf "Why is the sky blue?"

An argument is a model if it is the path of a GGUF file, or can only be a model: it ends in .gguf, begins
like a path, or is a catalog name or org/repo. Everything else is a prompt. What could be either is refused:
a typo in a model's name must not become a question to another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.options.declaration import option
from edgespec.config import OPTIONS
from edgespec.errors import UsageError, similar
from edgespec.files.user_folders import expanded

FirstWord = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=OPTIONS["model"].help,
        autocompletion=complete_model,
    ),
]
MoreWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help="The prompt, in quotes; the model can be omitted."),
]
NamedModel = Annotated[
    str | None,
    option(
        "Model",
        "-m --model",
        "Model to use, when the positional argument is the prompt. Default: smollm2-135m.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]

_SAY_WHICH = "Use --model NAME for a model, -p TEXT for a prompt."
_PATH_STARTS = ("/", "./", "../", "~")


def words_of(first: str | None, more: Sequence[str] | None) -> list[str]:
    """All arguments without a flag."""
    return [*([] if first is None else [first]), *(more or ())]


def model_and_prompt(
    words: Sequence[str], *, model: str | None, prompt: str | None, model_is_given: bool, asks: bool = True
) -> tuple[str | None, str | None]:
    """Tell which of the arguments is the model, and which the prompt.

    Args:
        model: from --model, the environment or the configuration file.
        prompt: from -p.
        model_is_given: --model is on the command line, so no argument can be another model.
        asks: whether the command takes a prompt this time; with --input it does not.

    Raises:
        UsageError: there are too many arguments, or one could be either.
    """
    open_places = (0 if model_is_given else 1) + (1 if prompt is None and asks else 0)
    if len(words) > open_places:
        raise _too_many(words, model_is_given=model_is_given, prompt=prompt, asks=asks)
    if not words:
        return model, prompt
    if len(words) == 2:
        if not is_model(words[0]):
            raise UsageError(
                f"There is no model '{_short(words[0])}'.",
                "The model comes first, then the prompt. A prompt of several words needs quotes.",
            )
        return words[0], words[1]
    if prompt is not None or not asks:
        return words[0], prompt
    if not model_is_given and is_model(words[0]):
        return words[0], None
    return model, words[0]


def is_model(word: str) -> bool:
    """True if an argument names a model, rather than being a prompt.

    Raises:
        UsageError: it could be either.
    """
    from edgespec.models.hub import catalog
    from edgespec.models.hub.names import parse_hub_name

    path = expanded(word)
    spaced = bool(re.search(r"\s", word))
    is_file = _holds(path.is_file)
    ends_as_model = word.lower().endswith(".gguf")
    if is_file and (ends_as_model or _has_magic(path)):
        return True
    if spaced or not word:
        return ends_as_model and word.startswith(_PATH_STARTS)
    if is_file:
        raise UsageError(
            f"'{word}' is a file, but not a GGUF model.",
            f"To ask about it: edgespec generate -p TEXT <{word}. As a prompt of one word: -p {word}",
        )
    if _holds(path.is_dir) and catalog.models_in(path):
        return True
    if ends_as_model or (word.startswith(_PATH_STARTS) and len(word) > 1):
        return True
    name = word.partition(":")[0]
    if catalog.entry_for(word) is not None or parse_hub_name(word) is not None:
        return True
    from edgespec.models.hub.external import find_external

    if find_external(word) is not None:
        return True
    close = similar(name, catalog.names())
    if not close and re.search(r"\d", word):  # a version or a size, as in gemma2 and qwen4:8b
        close = catalog.close_names(word, 1)
    if close:
        raise UsageError(f"There is no model '{word}'. Did you mean {close[0]}?", _SAY_WHICH)
    if _holds(path.is_dir) or re.fullmatch(r"[\w.-]+:[\w.-]+", word, re.ASCII):
        raise UsageError(f"'{word}' could be a model or a prompt.", _SAY_WHICH)
    return False


def _too_many(words: Sequence[str], *, model_is_given: bool, prompt: str | None, asks: bool) -> UsageError:
    if not asks:
        return UsageError("Both a prompt and --input were given.", "Give one of them.")
    if prompt is not None:
        extra = words[-1]
        if len(words) == 2:
            return UsageError(
                f"Both --prompt and the prompt '{_short(extra)}' were given.", "Give one of them."
            )
        if model_is_given and len(words) == 1:
            return UsageError(
                f"Unexpected argument '{_short(extra)}': --model and --prompt are already given.",
                "Leave it out.",
            )
    return UsageError(
        f"Expected a model and a prompt, but got {len(words)} arguments: {_short(' '.join(words))}",
        f'Put the prompt in quotes: "{_short(" ".join(words))}"',
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about a path; False if no file can have that name, as with most prompts."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
