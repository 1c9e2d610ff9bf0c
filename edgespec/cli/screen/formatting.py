"""Figures, tables and sizes as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.generation.result import Generation


def format_gigabytes(n_bytes: float) -> str:
    """Such as 1.84 GB, with 10^9 bytes per GB."""
    return f"{n_bytes / 1e9:.2f} GB"


def format_statistics(generation: Generation) -> str:
    """The figures of an answer in one line."""
    count = len(generation.tokens)
    return ", ".join(
        [
            f"{count} token{'' if count == 1 else 's'}",
            f"{generation.tokens_per_second:.1f} tokens/s",
            f"{generation.tokens_per_pass:.2f} tokens per pass",
            f"bound by {generation.bound_by}",
            *([f"{generation.gain:.1f}x plain decoding"] if generation.gain else []),
            _mode(generation),
        ]
    )


def details(generation: Generation) -> dict[str, str]:
    """The figures of an answer, by name."""
    timings, memory = generation.timings, generation.memory
    if not generation.passes:
        return {
            "prompt": f"{generation.prompt_tokens} tokens, {timings.prefill_s:.2f} s spent on reading them",
            "answer": f"none; {generation.finish_reason} before it began",
            "mode": _mode(generation),
        }
    return {
        "prompt": f"{generation.prompt_tokens} tokens, read in {timings.prefill_s:.2f} s",
        "answer": f"{len(generation.tokens)} tokens in {timings.decode_s:.2f} s, "
        f"{generation.tokens_per_second:.1f} tokens/s, ended by {generation.finish_reason}",
        "passes": f"{len(generation.passes)}, {generation.tokens_per_pass:.2f} tokens and "
        f"{generation.nodes_per_pass:.1f} nodes each, {generation.acceptance_rate:.0%} of drafts accepted",
        "time": f"{timings.draft_s:.2f} s drafting, {timings.verify_s:.2f} s verifying, "
        f"{timings.io_wait_s:.2f} s of it waiting for the disk",
        "gain": f"{generation.gain:.2f}x plain decoding, by a pass of {1e3 * generation.plain_pass_s:.1f} ms"
        if generation.gain
        else "not known: no plain pass was measured beside trees",
        "memory": f"{memory.peak_rss_bytes / 2**30:.2f} GiB at most of {memory.budget_bytes / 2**30:.2f} GiB",
        "mode": _mode(generation) + (f", seed {generation.seed}" if generation.seed else ""),
    }


def _mode(generation: Generation) -> str:
    if generation.lossy:
        return f"lossy ({generation.verify})"
    return "exact" if generation.exact else "not bit-exact"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, for results; nothing is truncated, so that paths can be copied."""
    lines = [tuple(headings), *map(tuple, rows)] if headings else [tuple(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "".join(f"{line}\n" for line in text)


def in_columns(rows: Sequence[tuple[str, str]], width: int | None = None) -> list[str]:
    """Lines with a name and a text each; texts are wrapped to the right of the names.

    Args:
        width: of the window; None does not wrap, for pipes.
    """
    import textwrap

    margin = max((len(name) for name, _ in rows), default=0) + 2
    if width is None:
        return [f"{name:<{margin}}{text}".rstrip() for name, text in rows]
    lines: list[str] = []
    for name, text in rows:
        lines += textwrap.wrap(
            text,
            max(width - 1, margin + 12),
            initial_indent=f"{name:<{margin}}",
            subsequent_indent=" " * margin,
            break_long_words=False,  # paths are copied
            break_on_hyphens=False,
        ) or [name]
    return lines
