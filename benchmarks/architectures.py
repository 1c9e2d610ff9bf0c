"""Tabulate what works with each architecture that this llama.cpp build knows.

    python -m benchmarks.architectures [--keep FOLDER] [NAME ...]

Makes a tiny model with random weights of each: those that the tests have (tests/tiny.py,
tests/tiny_hybrids.py), and others by asking llama.cpp what is missing (tests/fuzz/architectures.py). What is
tried runs in a process of its own, whose death is a result too:

- drafts: whether trees share one pass, or a draft is a chain;
- exact: whether a row rule gives the same bits for every number of rows, and which;
- streaming: whether layers that are read from disk in every pass give the same bits;
- shared passes: whether several texts may share a pass;
- heads: whether the hidden states that heads read are found.

A random model shows whether bits and bookkeeping are right. It says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from benchmarks.harness import parser_of, print_head
from edgespec.base.progress import no_progress
from edgespec.config import Config
from edgespec.costs.planned_weights import HitRates
from edgespec.errors import EdgeSpecError, MemoryLimitError
from edgespec.heads.hidden_states import LayerTap
from edgespec.kernels.ggml import UnsupportedBuild
from edgespec.llama.cache.shared_cells import SharedCells
from edgespec.llama.cache.state_cache import N_SEQUENCES
from edgespec.llama.cache.tree_cache import BranchingCache
from edgespec.llama.row_rule import FREE, THOROUGH, RowRule, Search, find_row_rule
from edgespec.llama.runtime.backend import start_backend
from edgespec.llama.runtime.batch import TokenBatch, tree_batch
from edgespec.llama.runtime.context import Context, FloatArray
from edgespec.llama.runtime.device_layers import ON_PROCESSOR
from edgespec.llama.runtime.model import Model
from edgespec.llama.state_trees import BranchExactness, try_branches
from edgespec.loading.streamed_model import open_streamed_model, prepare_stream
from edgespec.models.gguf.footprint import Footprint
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.layers import ModelFiles
from edgespec.models.hub import catalog
from edgespec.planning.memory.needs import MemoryNeeds
from edgespec.planning.memory.stream_layout import StreamLayout
from edgespec.speculation.tree import TokenTree
from tests.fuzz.architectures import NotMade, make, names
from tests.fuzz.headers import Header
from tests.tiny import ARCHITECTURES, MIXTURES, write_tiny
from tests.tiny_hybrids import HYBRIDS

Row = dict[str, str]
COLUMNS = ("drafts", "exact", "streaming", "shared passes", "heads")
_ROWS = 8  # of every pass that is compared
_MAX_ERROR = 1e-3  # a normalized squared error; garbage has 1 or more
_SEARCH = Search(THOROUGH.rules, THOROUGH.row_counts, 2)
_PARENTS = (-1, 0, 0, 1, 2, 2, 4)


def main() -> int:
    options = _parse()
    start_backend()
    vocabulary_of = catalog.find(None)
    print_head("architecture", *COLUMNS)
    failed = []
    with _folder(options.keep) as folder:
        for name in options.names or names():
            path = folder / f"{name}.gguf"
            try:
                if not path.exists():
                    write(name, vocabulary_of, path)
            except NotMade as error:
                failed.append(f"{name} ({' '.join(str(error).split())[-80:]})")
                continue
            row = _in_child(lambda path=path: try_all(path))  # type: ignore[misc]
            print(f"| {name} | {' | '.join(row.get(column, '') for column in COLUMNS)} |", flush=True)
    print(f"\nNo tiny model could be made of {len(failed)}: {', '.join(failed) or '-'}.")
    return 0


def write(name: str, vocabulary_of: Path, path: Path) -> None:
    """A tiny model of an architecture.

    Raises:
        NotMade: none is known that loads.
    """
    kind = (ARCHITECTURES | MIXTURES | HYBRIDS).get(name)
    if kind is not None:
        write_tiny(path, name, vocabulary_of, kind=kind)
    else:
        write_random(make(name, vocabulary_of), path)


def write_random(header: Header, path: Path) -> None:
    """The file with random weights, at a scale that keeps states finite."""
    data = bytearray(header.to_bytes())
    at = len(data) - sum(-(-tensor.n_bytes // 32) * 32 for tensor in header.tensors)
    rng = np.random.default_rng(1)
    for tensor in header.tensors:
        name = tensor.name.decode()
        values = rng.standard_normal(int(np.prod(tensor.shape)))
        if "norm" in name and name.endswith("weight"):
            values = 1 + 0.2 * values
        elif name.endswith("ssm_a"):
            values = -np.abs(values) - 0.05
        elif len(tensor.shape) > 1 and name != "token_embd.weight":
            values *= 1.2 * tensor.shape[0] ** -0.5
        elif name != "token_embd.weight":
            values *= 0.1
        raw = values.astype(np.float16 if tensor.type_id == 1 else np.float32).tobytes()
        data[at : at + len(raw)] = raw
        at += -(-tensor.n_bytes // 32) * 32
    path.write_bytes(data)


def try_all(path: Path) -> Row:
    """Everything about one model."""
    row: Row = {}
    with Model(path, vetted=False) as model:
        if model.keeps_recurrent_state:
            context = _open(model, N_SEQUENCES, branching=True)
            found = try_branches(context) if context.branches else BranchExactness.WRONG
            context.branches = found is not BranchExactness.WRONG
            row["drafts"] = "trees" if context.branches else "chains"
            row["exact"] = _exact(context) if context.branches else "no"
            row["shared passes"] = "no"
        else:
            context = _open(model, 16)
            works = _trees_work(context)
            row["drafts"] = "trees" if works else "no"
            row["shared passes"] = "yes" if works else "no"
            row["exact"] = _exact(context)
        context.close()
        context = _open(model, 1)
        expected = _logits(context)
        context.close()
        row["heads"] = "yes" if _shows_hidden(model) else "no"
    try:
        row["streaming"] = "yes" if np.array_equal(_streamed(path), expected) else "differs"
    except UnsupportedBuild:  # its layers were made as layers for multi-token prediction
        row["streaming"] = "no layers"
    return row


def _open(model: Model, n_sequences: int, *, branching: bool = False) -> Context:
    return Context(
        model, n_cells=192, n_rows=64, n_outputs=64, n_sequences=n_sequences, n_threads=1, branching=branching
    )


def _trees_work(context: Context) -> bool:
    """True if each path of a tree gets the logits that a chain gives it, but for rounding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, context.model.vocabulary.n_tokens, 24).tolist()
    text = tokens[:_ROWS]
    tree = TokenTree.build(tokens[_ROWS:][: len(_PARENTS)], _PARENTS, [0.0] * len(_PARENTS))
    cache = BranchingCache(SharedCells(context, ordered=False))
    cache.append(TokenBatch.run(text, 0, 1))
    cache.open(len(tree.leaves))
    cache.try_branches(tree_batch(tree, cache.length))
    found = context.logits().copy()
    for leaf in tree.leaves.tolist():
        context.clear()
        path = tree.path(leaf)
        context.decode(TokenBatch.run(text, 0, 1))
        context.decode(TokenBatch.run(tree.tokens[path], _ROWS, 1, logits="all"))
        expected = context.logits()
        error = np.square(found[path] - expected).sum() / np.square(expected - expected.mean()).sum()
        if not error < _MAX_ERROR:  # NaN is wrong, too
            return False
    context.clear()
    return True


def _exact(context: Context) -> str:
    for search, words in ((FREE, "yes"), (_SEARCH, "yes, {}")):
        if rule := find_row_rule(context, search):
            return words.format(_words(rule))
    return "no"


def _words(rule: RowRule) -> str:
    multiple = f"rows in multiples of {rule.multiple}, " if rule.multiple > 1 else ""
    return f"{multiple}at least {rule.minimum} rows"


def _logits(context: Context) -> FloatArray:
    context.clear()
    context.decode(TokenBatch.run(list(range(3, 3 + _ROWS)), 0, 1, logits="all"))
    logits: FloatArray = context.logits().copy()
    return logits


def _shows_hidden(model: Model) -> bool:
    header = read_header(model.path)
    tap = LayerTap([1], header.metadata[f"{header.architecture}.embedding_length"])
    context = Context(model, n_cells=64, n_rows=16, n_outputs=16, n_sequences=1, n_threads=1, observers=[tap])
    with suppress(EdgeSpecError):
        tap.require_rows(context)
        return True
    return False


def _streamed(path: Path) -> FloatArray:
    files, budget = ModelFiles.of(read_header(path)), 1 << 16
    needs, config = MemoryNeeds([Footprint(files.tensor_bytes, 0, 0)], 0), Config.of(experts="never")
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                layout = StreamLayout.of(files, needs, budget, config, HitRates(), packed=True)
                break
            except MemoryLimitError as error:
                if error.least is None or error.least <= budget:
                    raise
                budget = error.least
        plan = prepare_stream(files, layout, "always", Path(folder), no_progress)
        with open_streamed_model(path, plan, ON_PROCESSOR, no_progress) as model:
            return _logits(_open(model, 1))


def _in_child(function: Callable[[], Row]) -> Row:
    """The result of a function in a fork; how it died, if it did."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.environ["GGML_NO_BACKTRACE"] = "1"
        try:
            found = function()
        except EdgeSpecError as error:
            found = {"drafts": error.what}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"drafts": f"dies of {signal.Signals(os.WTERMSIG(status)).name}"}
    return dict(json.loads(said)) if said else {"drafts": "fails"}


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all if there are none")
    parser.add_argument("--keep", type=Path, help="a folder in which the models are kept for the next run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
