"""The child process that renders chat templates, isolated from everything they could harm.

Run by `template.py` as a script with an isolated interpreter, so it imports the standard library
and jinja2 only; its only argument, if any, is the folder that jinja2 is installed in. It prints
`{"ready": true}` once, then answers each line of JSON

    {"source", "bos", "eos", "messages", "add_generation_prompt", "variables", "max_chars", "timeout_s"}

with `{"text": str}` or `{"error": str, "kind": "refused" | "syntax" | "too_long" | "memory" |
"failed"}`, and ends with its standard input. Text from a template is data: it never decides which
fields an answer has.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

_MAX_ERROR_CHARS = 1000


class Refused(Exception):
    """The template called `raise_exception`."""


class TooLong(Exception):
    """The rendered text exceeded the limit."""


def main() -> None:
    # Ctrl-C in the terminal reaches this process too; only its parent decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.extend(sys.argv[1:2])
    try:
        render = make_renderer()
    except ImportError as error:
        _answer({"ready": False, "error": str(error)})
        return
    _answer({"ready": True})
    while line := sys.stdin.buffer.readline():
        _answer(_respond(render, line))
        del line


def make_renderer() -> Callable[[Mapping[str, Any]], str]:
    """Import jinja2 and return what renders one request."""
    environment = _make_environment()
    compiled: dict[str, Any] = {}

    def render(request: Mapping[str, Any]) -> str:
        source = request["source"]
        if source not in compiled:
            compiled[source] = environment.from_string(source)
        variables = {
            "messages": request["messages"],
            "tools": None,
            "documents": None,
            "bos_token": request["bos"],
            "eos_token": request["eos"],
            "add_generation_prompt": request["add_generation_prompt"],
            **request.get("variables", {}),
        }
        pieces = []
        room = request["max_chars"]
        for piece in compiled[source].generate(variables):
            room -= len(piece)
            if room < 0:
                raise TooLong
            pieces.append(piece)
        return "".join(pieces)

    return render


def _make_environment() -> SandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's part for training; here it only wraps it."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _respond(render: Callable[[Mapping[str, Any]], str], line: bytes) -> dict[str, str]:
    from jinja2 import TemplateSyntaxError

    try:
        request = json.loads(line)
        _end_self_after(2 * request["timeout_s"] + 1)
        return {"text": render(request)}
    except Refused as error:
        return {"kind": "refused", "error": str(error)[:_MAX_ERROR_CHARS]}
    except TooLong:
        return {"kind": "too_long", "error": ""}
    except MemoryError:
        return {"kind": "memory", "error": ""}
    except TemplateSyntaxError as error:
        detail = f"line {error.lineno}: {error.message}"
        return {"kind": "syntax", "error": detail[:_MAX_ERROR_CHARS]}
    except Exception as error:  # any failure is the template's own, and is reported
        detail = str(error) or type(error).__name__
        return {"kind": "failed", "error": detail[:_MAX_ERROR_CHARS]}
    finally:
        _end_self_after(0)


def _answer(message: Mapping[str, Any]) -> None:
    try:
        line = json.dumps(message).encode() + b"\n"
    except MemoryError:
        line = b'{"kind": "memory", "error": ""}\n'
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _end_self_after(seconds: float) -> None:
    """End this process after so long, in case its parent is gone; 0 cancels that."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,  # filters such as map give generators
    )


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


if __name__ == "__main__":
    main()
