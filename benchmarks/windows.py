"""Answers behind long prompts, with a drafter that reads all of a text and with ones that read its two ends.

    python -m benchmarks.windows --target big.gguf --drafter small.gguf [--lengths 16000] [--windows 0 1024]

A conversation begins with files of this repository, as many tokens as asked for, and is saved with its state.
Then the pair is loaded once for each window, resumes the conversation, and answers the same questions in the
same order; `plain` drafts nothing. A window of 0 reads everything. The first question's time to its first
token includes the drafter's reading.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import edgespec
from benchmarks.harness import parser_of, print_head
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Generation

ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "Which of these files would you read first, and why?",
    "Write a Python function that prints the first line of each file in a folder.",
    "Write a test for a function of one of these files.",
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--windows", nargs="+", default=["plain", "0", "1024", "4096"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, help="of every tree (default: sized while running)")
    options = parser.parse_args()
    print_head("tokens", "window", "first token, s", "tokens/s", "tokens a pass", "a draft step, ms")
    with tempfile.TemporaryDirectory() as folder:
        for length in options.lengths:
            begun = Path(folder) / f"{length}.json"
            begin(options, length, begun)
            for window in options.windows:
                made = answers(options, length, window, begun)
                _show(length, window, made)


def begin(options: argparse.Namespace, length: int, file: Path) -> None:
    """Have the target alone read the long text, and save the conversation."""
    with edgespec.load(
        options.target, draft="none", memory=options.memory, context=_context(options, length), learn=False
    ) as engine:
        session = edgespec.Session(engine)
        vocabulary = engine.target.model.vocabulary
        text = ""
        for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("edgespec/**/*.py")]):
            text += f"\n{path.relative_to(ROOT)}:\n{path.read_text(encoding='utf-8')}"
            if len(tokens := vocabulary.tokenize(text, control=False)) >= length:
                break
        session.save_to(file)
        question = text[: len(text) * length // len(tokens)] + "\nRemember these files."
        for _ in session.ask(question, GenerationConfig(max_tokens=1, temperature=0)):
            pass
        session.close()


def answers(options: argparse.Namespace, length: int, window: str, begun: Path) -> list[Generation]:
    """The answers to all questions behind the long text."""
    plain = window == "plain"
    with edgespec.load(
        options.target,
        draft="none" if plain else options.drafter,
        draft_window=None if plain else int(window),
        memory=options.memory,
        context=_context(options, length),
        learn=False,
    ) as engine:
        if not plain:
            engine.set_tree_budget(options.nodes)
        session = edgespec.Session(engine)
        copy = begun.with_stem(f"{length}-{window}")
        shutil.copy(begun, copy)
        shutil.copytree(f"{begun}.kv", f"{copy}.kv")
        session.resume(copy)
        made = []
        for question in QUESTIONS:
            *_, last = session.ask(question, GenerationConfig(max_tokens=options.tokens, temperature=0))
            assert last.generation is not None
            made.append(last.generation)
        session.close()
        return made


def _context(options: argparse.Namespace, length: int) -> int:
    tokens: int = options.tokens
    return length + 256 + len(QUESTIONS) * (tokens + 64)


def _show(length: int, window: str, made: list[Generation]) -> None:
    passes = [one for answer in made for one in answer.passes]
    tokens = sum(one.accepted + 1 for one in passes)
    steps = sum(one.draft_steps for one in passes)
    print(
        f"| {length} | {window} | {made[0].timings.prefill_s:.1f} "
        f"| {tokens / sum(answer.timings.decode_s for answer in made):.2f} | {tokens / len(passes):.2f} "
        f"| {1000 * sum(one.draft_s for one in passes) / max(steps, 1):.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
