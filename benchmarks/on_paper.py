"""How models that are not here would run, for a table of models and memories: the README's first one.

    python -m benchmarks.on_paper
    python -m benchmarks.on_paper --disk 0.5e9 --memory 8 16

Computed, not measured: files get the headers of real models in Q4_K_M, and no weights. The planner measures
how fast this processor multiplies by weights of these types, as `edgespec plan` does for a model that never
ran here; the speed of the disk is given. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gguf

from benchmarks.hollow_files import write_hollow
from edgespec.config import Config
from edgespec.errors import MemoryLimitError
from edgespec.plans.model_plan import plan_for
from edgespec.profiles.store import DiskProfile, ProfileStore, disk_key
from edgespec.progress import no_progress

_Q4, _Q5, _Q6 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q5_0", "Q6_K"))
_SUPER = 256  # elements of a block of Q4_K or Q6_K
_GB = 1e9


@dataclass(frozen=True)
class Shape:
    """The sizes of a model like Qwen2.5's: widths in elements."""

    name: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int = 128
    vocabulary: int = 151_936
    tied: bool = False

    def matrices(self) -> dict[str, tuple[int, int, gguf.GGMLQuantizationType]]:
        """(rows, row length, type) by name, as llama.cpp's Q4_K_M chooses types."""
        keys = self.kv_heads * self.head
        found = {"token_embd": (self.vocabulary, self.width, _Q4)}
        if not self.tied:
            found["output"] = (self.vocabulary, self.width, _Q6)
        for layer in range(self.layers):
            eighth = self.layers // 8
            more = layer < eighth or layer >= self.layers - eighth or (layer - eighth) % 3 == 2
            wide = _Q6 if more else _Q4
            found |= {
                f"blk.{layer}.attn_q": (self.heads * self.head, self.width, _Q4),
                f"blk.{layer}.attn_k": (keys, self.width, _Q4),
                f"blk.{layer}.attn_v": (keys, self.width, wide),
                f"blk.{layer}.attn_output": (self.width, self.heads * self.head, _Q4),
                f"blk.{layer}.ffn_gate": (self.feed_forward, self.width, _Q4),
                f"blk.{layer}.ffn_up": (self.feed_forward, self.width, _Q4),
                f"blk.{layer}.ffn_down": (self.width, self.feed_forward, wide),
            }
        # Rows that no block of 256 divides are stored in blocks of 32.
        return {
            name: (rows, length, kind if length % _SUPER == 0 else _Q5)
            for name, (rows, length, kind) in found.items()
        }


TARGETS = (
    Shape("Qwen2.5 7B", 28, 3584, 18_944, 28, 4, vocabulary=152_064),
    Shape("Qwen2.5 14B", 48, 5120, 13_824, 40, 8, vocabulary=152_064),
    Shape("Qwen2.5 32B", 64, 5120, 27_648, 40, 8, vocabulary=152_064),
    Shape("Qwen2.5 72B", 80, 8192, 29_568, 64, 8, vocabulary=152_064),
)
DRAFTER = Shape("Qwen2.5 0.5B", 24, 896, 4864, 14, 2, head=64, vocabulary=152_064, tied=True)


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--memory", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="GiB")
    parser.add_argument("--disk", type=float, default=3.5e9, help="bytes a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ProfileStore(folder / "profiles")
        drafter = write_header(folder, DRAFTER)
        store.put(disk_key(drafter), DiskProfile(options.disk, options.disk, 1 << 20, 4))
        print("| model (Q4_K_M) | " + " | ".join(f"{memory} GiB" for memory in options.memory) + " |")
        print("|---" * (len(options.memory) + 1) + "|")
        for shape in TARGETS:
            model = write_header(folder, shape)
            cells = [cell(model, drafter, memory << 30, store) for memory in options.memory]
            print(f"| {shape.name}, {model.stat().st_size / _GB:.1f} GB | {' | '.join(cells)} |", flush=True)


def cell(model: Path, drafter: Path, memory: int, store: ProfileStore) -> str:
    """Tokens a second, and in brackets those of plain decoding; bold where weights are streamed."""
    try:
        asked = Config.of(model=model, draft=drafter, memory=memory, gpu_layers=0)
        plan = plan_for(asked, no_progress, store)
    except MemoryLimitError:
        return "too little"
    best, plain = plan.chosen.tokens_per_second, plan.plain.tokens_per_second
    speed = f"**{best:.1f}**" if plan.plain.holding.streamed_bytes else f"{best:.1f}"
    return f"{speed} ({plain:.1f})"


def write_header(folder: Path, shape: Shape) -> Path:
    """A file with the header of a model, and a hole where its weights would be."""
    path = folder / f"{shape.name.lower().replace(' ', '-')}-q4_k_m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(shape.layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(shape.vocabulary)])
    return write_hollow(writer, path, shape.matrices())


if __name__ == "__main__":
    main()
