"""Arguments without a flag: a model, a prompt, or both.

    edgespec generate "Why is the sky blue?"
    edgespec generate big.gguf "Why is the sky blue?"

A single word is the name of a model, or refused: a typo must not become a question to another model. Text
with spaces or punctuation is a prompt, unless it is the path of a GGUF file. `-p` takes any prompt.
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
from edgespec.errors import UsageError
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

_HINT = "Use --model NAME for a model, -p TEXT for a prompt; a prompt of several words needs quotes."
_PATH_STARTS = ("/", "./", "../", "~")
_NAME = re.compile(r"[\w.+-][\w.@/+-]{0,200}(:[\w.-]+)?", re.ASCII)


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
    """
    takes_prompt = prompt is None and asks
    if len(words) > (not model_is_given) + takes_prompt:
        raise _too_many(words, prompt=prompt, asks=asks)
    match words:
        case [name, text]:
            if not is_model(name):
                raise UsageError(f"There is no model '{_short(name)}'.", _HINT)
            return name, text
        case [word] if not takes_prompt or (not model_is_given and is_model(word)):
            if takes_prompt:
                _check_file(word)
            return word, prompt
        case [word] if model_is_given and _is_known(word):
            raise UsageError(
                f"Two models were named: {_short(word)} and {model}.", "Name one; -p TEXT is a prompt."
            )
        case [word]:
            return model, word
    return model, prompt


def is_model(word: str) -> bool:
    """True if an argument names a model, rather than being a prompt."""
    from edgespec.models.hub import catalog

    if _is_known(word):
        return True
    if not _NAME.fullmatch(word):
        return False
    close = catalog.close_names(word, 1)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise UsageError(f"There is no model '{word}'.{meant}", _HINT)


def _check_file(model: str) -> None:
    """Refuse a path that leads to no GGUF file, before a prompt is waited for."""
    from edgespec.models.gguf.header import read_header
    from edgespec.models.hub import catalog

    if model.lower().endswith(".gguf") or model.startswith(_PATH_STARTS):
        read_header(catalog.find(model, fetch=False))


def _is_known(word: str) -> bool:
    """True for a path that can only be a model's, and for a name that is known here."""
    from edgespec.models.hub import catalog
    from edgespec.models.hub.external import find_external
    from edgespec.models.hub.names import parse_hub_name

    path = expanded(word)
    spaced = not word or bool(re.search(r"\s", word))
    if word.lower().endswith(".gguf"):
        return not spaced or word.startswith(_PATH_STARTS) or _holds(path.is_file)
    if _holds(lambda: _has_magic(path)):
        return True
    if spaced:
        return False
    if word.startswith(_PATH_STARTS) or _holds(lambda: path.is_dir() and bool(catalog.models_in(path))):
        return True
    if not _NAME.fullmatch(word):
        return False
    return (catalog.entry_for(word) or parse_hub_name(word) or find_external(word)) is not None


def _too_many(words: Sequence[str], *, prompt: str | None, asks: bool) -> UsageError:
    if not asks:
        return UsageError("Both a prompt and --input were given.", "Give one of them.")
    if prompt is not None:
        what = f"Both --prompt and the prompt '{_short(words[-1])}' were given."
        return UsageError(what, "Give one of them.")
    text = _short(" ".join(words))
    return UsageError(
        f"Expected a model and a prompt, but got {len(words)} arguments: {text}",
        f'Put the prompt in quotes: "{text}"',
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
