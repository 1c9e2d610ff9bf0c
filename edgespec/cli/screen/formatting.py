"""Figures, tables and sizes as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgespec.base.units import readable, readable_duration, readable_rate
from edgespec.printable import one_line

if TYPE_CHECKING:
    from edgespec.generation.expert_use import ExpertUse
    from edgespec.generation.result import Generation

_LEAST_GAIN = 1.05  # times the plain speed: less is shown as no gain


def format_statistics(generation: Generation) -> str:
    """The figures of an answer in one line, such as "60 tokens, 46.7/s, 1.7x".

    The factor is the speed against one token a pass. It is left out where nothing was drafted or gained, and
    where such a pass is of unknown length.
    """
    parts = [count(len(generation.tokens), "token")]
    if generation.reasoning_tokens:
        parts[0] += f" ({generation.reasoning_tokens} of thought)"
    if generation.tokens_per_second:
        parts.append(readable_rate(generation.tokens_per_second, "/s"))
    if generation.paused_drafting:
        parts.append("drafting paused: it did not pay")
    elif generation.gain >= _LEAST_GAIN:
        parts.append(f"{generation.gain:.1f}x")
    if generation.lossy:
        parts.append(f"lossy ({generation.verify})")
    return ", ".join(parts)


def is_cut_off(generation: Generation) -> bool:
    """True if the answer ended because it reached --max-tokens."""
    return generation.finish_reason == "length" and not generation.context_full


def details(generation: Generation) -> dict[str, str]:
    """The figures of an answer, by name."""
    timings, memory = generation.timings, generation.memory
    if not generation.passes:
        return {
            "prompt": f"{generation.prompt_tokens} tokens, processed for {timings.prefill_s:.2f} s",
            "answer": f"none ({_ending(generation)})",
            "mode": _mode(generation),
        }
    return {
        "prompt": f"{generation.prompt_tokens} tokens in {timings.prefill_s:.2f} s",
        "answer": f"{count(len(generation.tokens), 'token')} in {_decoding(generation)}; "
        f"{_ending(generation)}",
        **(
            {"thought": f"{generation.reasoning_tokens} of these tokens"}
            if generation.reasoning_tokens
            else {}
        ),
        **({"speed-up": _speed_up(generation)} if generation.drafted else {}),
        "drafts": _drafts(generation),
        "time": "{drafter:.2f} s drafting, {compute:.2f} s computing passes, "
        "{disk:.2f} s waiting for the disk".format(**generation.time_parts),
        "limited by": _limit(generation),
        **({"experts": _experts(experts, generation)} if (experts := generation.experts) else {}),
        "memory": f"peak {readable(memory.peak_rss_bytes)} of {readable(memory.budget_bytes)}",
        "mode": _mode(generation),
        **({"seed": str(generation.seed)} if generation.seed else {}),
    }


_LIMITS = {
    "disk": ("the disk", "waiting for weights"),
    "compute": ("the processor", "the model's arithmetic"),
    "drafter": ("the drafter", "drafting"),
}
_ENDINGS = {
    "stop": "complete",
    "length": "cut off by max_tokens",
    "cancelled": "stopped",
    "error": "failed",
    "tool_calls": "calls tools",
}


def _limit(generation: Generation) -> str:
    parts, largest = generation.time_parts, generation.bound_by
    resource, work = _LIMITS[largest]
    took = "most of the time" if parts[largest] > sum(parts.values()) / 2 else "longest"
    return f"{resource}: {work} took {took}"


def _ending(generation: Generation) -> str:
    return "cut off by a full context" if generation.context_full else _ENDINGS[generation.finish_reason]


def _experts(use: ExpertUse, generation: Generation) -> str:
    figures = use.to_json(sum(record.accepted + 1 for record in generation.passes))
    return (
        f"{use.hit_rate:.0%} found in memory; "
        f"{figures['read_per_token']:.1f} of {figures['needed_per_token']:.1f} read from disk per token "
        f"({readable(figures['read_bytes_per_token'])})"
    )


def _speed_up(generation: Generation) -> str:
    if not generation.gain:
        if any(record.shared for record in generation.passes):
            return "unknown: passes were shared"
        if len(generation.passes) == 1:
            return "unknown: the answer took a single pass"
        return "unknown: no recent pass without drafts was timed"
    return (
        f"{generation.gain:.2f}x over plain decoding, which takes "
        f"{readable_duration(generation.plain_pass_s)} per token"
    )


def _decoding(generation: Generation) -> str:
    """The time of an answer after its first pass, and its speed."""
    if len(generation.passes) == 1:
        return "the first pass"
    rate = generation.tokens_per_second
    return f"{generation.timings.decode_s:.2f} s" + (f", {readable_rate(rate, '/s')}" if rate else "")


def _drafts(generation: Generation) -> str:
    passes = len(generation.passes)
    text = f"{count(passes, 'pass', 'passes')}, {generation.tokens_per_pass:.2f} tokens each"
    if not generation.drafted:
        return f"{text}; nothing drafted"
    accepted = sum(record.accepted for record in generation.passes)
    return f"{text}; {accepted} of {count(generation.drafted, 'drafted token')} accepted"


def _mode(generation: Generation) -> str:
    if generation.lossy:
        return f"lossy ({generation.verify}): the text may differ from the model's own"
    if generation.exact:
        return "exact: bit-identical to the text without drafts"
    return "not bit-exact: near-ties may differ from the text without drafts"


def count(number: int, name: str, plural: str = "") -> str:
    """A number and what it counts: 1 token, 2 tokens."""
    return f"{number} {name if number == 1 else plural or name + 's'}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, for results; see `ResultStream.table` for terminals."""
    from rich.cells import cell_len  # some characters take two columns

    lines = [tuple(map(one_line, row)) for row in ([headings, *rows] if headings else rows)]
    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "".join(f"{line.rstrip()}\n" for line in text)


def fitted(line: str, columns: int) -> str:
    """A line that is cut off where the window ends."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= columns else f"{set_cell_size(line, columns - 1)}…"


_NARROW = 20  # columns for texts
_LEAST_WIDTH = 8  # of a window; narrower ones break the lines themselves


def in_columns(rows: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Lines with a name and a text each; texts are wrapped to the right of the names.

    Where little room is left there, they are below the names.

    Args:
        width: of the window; None does not wrap, for pipes.
    """
    import textwrap

    rows = [(name, one_line(text)) for name, text in rows]
    margin = max((len(name) for name, _ in rows), default=0) + 2
    if width is None:
        return [f"{name:<{margin}}{text}".rstrip() for name, text in rows]
    width = max(width, _LEAST_WIDTH)
    below = width - margin < _NARROW
    lines: list[str] = []
    for name, text in rows:
        wrapped = textwrap.wrap(
            text,
            width - 1,
            initial_indent="  " if below else f"{name:<{margin}}",
            subsequent_indent="  " if below else " " * margin,
            break_long_words=False,  # paths are copied
            break_on_hyphens=False,
        )
        lines += [name, *wrapped] if below else wrapped or [name]
    return lines
