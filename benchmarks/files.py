"""Measure the gain from a person's own files as a source of drafts.

    python -m benchmarks.files --folder edgespec

The default model continues the beginnings of files in a folder, greedily and without a drafter, with three
sets of sources: the text and recycling; these and an index of the folder without the file in hand; and with
it. Everything that was learned is forgotten before each set, which then learns from file to file.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import edgespec
from benchmarks.workload import smollm2
from edgespec.drafters.folder_index import open_corpus
from edgespec.generation.config import GenerationConfig
from edgespec.progress import no_progress
from edgespec.speculation.drafters.proposing import ProposingDrafter
from edgespec.speculation.sources.base import Proposer
from edgespec.speculation.sources.corpus import FileSource
from edgespec.speculation.sources.recycling import RecycledSource
from edgespec.speculation.sources.text import TextSource


def main() -> None:
    options = _parse()
    paths = sorted(path for path in options.folder.rglob("*") if path.suffix in (".py", ".md"))
    paths = [path for path in paths if path.stat().st_size > 4 * options.prompt_tokens][:: options.every]
    paths = paths[: options.prompts]
    with (
        tempfile.TemporaryDirectory() as name,
        edgespec.load(
            smollm2(), draft="lookup", tree_budget=options.tree_budget, context=1024, exact=True, learn=False
        ) as engine,
    ):
        vocabulary = engine.target.model.vocabulary
        begun = time.perf_counter()
        whole, _ = open_corpus(options.folder, vocabulary, "files benchmark", no_progress)
        made_s = time.perf_counter() - begun
        without = Path(name) / "without"
        shutil.copytree(
            options.folder, without, ignore=lambda _, names: [p.name for p in paths if p.name in names]
        )
        rest, _ = open_corpus(without, vocabulary, "files benchmark", no_progress)
        print(f"{len(whole)} tokens, indexed in {made_s:.1f} s (0 if it was there)")
        text: list[Proposer] = [TextSource(), RecycledSource()]
        sets: dict[str, Sequence[Proposer]] = {
            "text and recycling": text,
            "and other files": [*text, FileSource(rest)],
            "and the file itself": [*text, FileSource(whole)],
        }
        print("| sources | tokens a pass | drafting, ms a pass |")
        print("|---|---|---|")
        written: list[list[int]] = []
        for name_of_set, proposers in sets.items():
            engine.drafter = ProposingDrafter(proposers)
            engine.forget_texts()
            made = []
            for path in paths:
                prompt = vocabulary.tokenize(path.read_text(), control=False)[: options.prompt_tokens]
                made.append(engine.generate(prompt, GenerationConfig(max_tokens=options.tokens)))
            answers = [answer.tokens for answer in made]
            written = written or answers
            assert answers == written, "sources change the speed alone"
            passes = sum(len(answer.passes) for answer in made)
            draft_ms = 1000 * sum(answer.timings.draft_s for answer in made) / passes
            print(f"| {name_of_set} | {sum(map(len, answers)) / passes:.2f} | {draft_ms:.1f} |", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("edgespec"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--every", type=int, default=9, help="files from one to the next")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tree-budget", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
