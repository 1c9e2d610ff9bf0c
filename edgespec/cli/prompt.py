"""Arguments without a flag: a model, a prompt, or both.

    edgespec generate "Why is the sky blue?"
    edgespec generate big.gguf "Why is the sky blue?"

A single word is the name of a model, or refused: a typo must not become a question to another model. Text
with spaces or punctuation is a prompt, unless it is the path of a GGUF file. `-p` takes any prompt.

Text from a pipe or a file goes before the prompt, separated by an empty line, as in `llm` and `ollama`. Other
kinds of standard input are not read if there is a prompt: a service or a container may inherit one on which
nothing ever arrives.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from edgespec.base.installation import POWERSHELL
from edgespec.cli.completion import complete_model
from edgespec.cli.options.declaration import option
from edgespec.cli.screen.terminal import Terminal, is_terminal
from edgespec.cli.utf8 import as_text, decoded
from edgespec.config import OPTIONS
from edgespec.errors import ModelFileError, UsageError
from edgespec.files.user_folders import begins_as_path, expanded, holds

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

_HINT = "If it is a prompt, use -p TEXT; several words need quotes."
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
                raise _unknown(name)
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
    if _is_known(word):
        return True
    if not _NAME.fullmatch(word):
        return False
    raise _unknown(word)


def _unknown(word: str) -> ModelFileError:
    from edgespec.models.hub import catalog

    error = catalog.unknown_model(_short(word))
    return ModelFileError(error.what, f"{error.hint} {_HINT}")


def _check_file(model: str) -> None:
    """Refuse a path that leads to no GGUF file, before a prompt is waited for."""
    from edgespec.models.gguf.header import read_header
    from edgespec.models.hub import catalog

    if model.lower().endswith(".gguf") or begins_as_path(model):
        read_header(catalog.find(model, fetch=False))


def _is_known(word: str) -> bool:
    """True for a path that can only be a model's, and for a name that is known here."""
    from edgespec.models.hub import catalog
    from edgespec.models.hub.external import find_external, models_in
    from edgespec.models.hub.names import parse_hub_name

    path = expanded(word)
    spaced = not word or bool(re.search(r"\s", word))
    if word.lower().endswith(".gguf"):
        return not spaced or begins_as_path(word) or holds(path.is_file)
    if holds(lambda: _has_magic(path)):
        return True
    if spaced:
        return False
    if begins_as_path(word) or holds(lambda: bool(models_in(path, deepest=0))):
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


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


_PATIENCE_S = 2.0
_WAITING = "Waiting for text on standard input. If there is none, " + (
    "put this before the command: $null |" if POWERSHELL else "add: </dev/null"
)
_MAX_BYTES = 64 << 20


def whole_prompt(prompt: str | None, terminal: Terminal, how: str) -> str:
    """The prompt, after the text that is piped in.

    Args:
        prompt: that of the command line; None reads all of standard input, whatever its kind.
        how: how to give a prompt, for the message if there is none.
    """
    if prompt is not None:
        prompt = as_text(prompt, "The prompt")
        if not prompt:
            raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
        piped = _read(terminal) if _is_pipe_or_file() else ""
        return f"{piped}\n\n{prompt}" if piped.strip() else prompt
    if sys.stdin is None or sys.stdin.closed or is_terminal(sys.stdin):
        raise UsageError("No prompt was given.", how)
    text = _read(terminal)
    if not text:
        raise UsageError("The prompt is empty.", "Give some text to answer or to continue.")
    return text


def _is_pipe_or_file() -> bool:
    mode = _mode()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _mode() -> int:
    """The file mode of standard input; 0 if it has none."""
    try:
        return os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return 0  # closed, or replaced by a Python object


def _read(terminal: Terminal) -> str:
    waiting = threading.Timer(_PATIENCE_S, terminal.note, (_WAITING,))
    try:
        if stat.S_ISFIFO(_mode()):  # without a word, an open pipe looks like a program that hangs
            waiting.start()
            try:
                sys.stdin.buffer.peek(1)  # type: ignore[union-attr]
            finally:
                waiting.cancel()
        data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"Standard input cannot be read: {error.strerror}.", "Give the prompt with -p TEXT."
        ) from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"Standard input has more than {_MAX_BYTES >> 20} MiB.", "Use a part of it.")
    return decoded(data, "The text on standard input").removesuffix("\n").removesuffix("\r")
