"""`edgespec draft make`: a drafter for a target that has none, found by search and registered.

The target generates text. Recipes are judged on one half of it, and the chosen drafter is measured on
the other half. A target larger than memory is streamed, and its drafters are mapped from disk while they are
measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.costs.pass_time import read_seconds
from edgespec.drafting.agreement import (
    PROMPTS,
    Agreement,
    AgreementMeter,
    PassCost,
    SampleAnswers,
    write_sample_answers,
)
from edgespec.drafting.recipe_search import CostModel, EvaluatedRecipe, Recipe, search
from edgespec.drafting.recipes import RecipeMeter, RecipeState
from edgespec.errors import BackendError, EdgeSpecError, OutputError, UsageError
from edgespec.files.writing import remove_abandoned
from edgespec.llama.quantize import KEEP, QUANTIZATIONS, make_drafter
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import MADE, DrafterPair, PairRegistry, drafters_folder
from edgespec.progress import Progress, no_progress

_CONTEXT = 1024
_FEW_PROMPTS, _FEW_TOKENS = 2, 24  # enough to time passes, if the text itself is known
_LOW_BITS = ("q4_0", "q3_k_m", "q2_k")


@dataclass(frozen=True)
class MadeDrafter:
    """A drafter that was made and registered.

    Attributes:
        agreement: on text that was not used to choose it.
        step_s: seconds of a draft step, which reads a few tokens.
        expected: what the search predicted.
        pass_s: seconds of a target pass for which it was chosen.
        tokens_per_second: how fast the target should be with it, by `agreement` and `step_s`.
    """

    target: Path
    path: Path
    recipe: Recipe
    agreement: Agreement
    step_s: float
    n_bytes: int
    expected: EvaluatedRecipe
    pass_s: float
    tokens_per_second: float

    @property
    def gain(self) -> float:
        """Speed-up over plain decoding."""
        return self.tokens_per_second * self.pass_s

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for scripts."""
        return {
            "target": str(self.target),
            "path": str(self.path),
            "recipe": {
                "quantization": self.recipe.quantization,
                "dropped": list(self.recipe.dropped),
                "text": str(self.recipe),
            },
            "agreement": {
                "top1": self.agreement.top1,
                "top4": self.agreement.top4,
                "tokens": self.agreement.tokens,
            },
            "step_s": self.step_s,
            "bytes": self.n_bytes,
            "pass_s": self.pass_s,
            "expected_tokens_per_second": self.expected.tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "gain": self.gain,
        }


@dataclass(frozen=True)
class MakeOptions:
    """Options for making a drafter.

    Attributes:
        memory: bytes that EdgeSpec may use while the target generates; None means what is available.
        size: most bytes of the drafter; None leaves it to the search.
        quantizations: those to choose from; if empty, the usual ones.
        keep_layers: requantize only.
        pass_s: seconds of a target pass to optimize for; None measures them.
        tokens: length of each of the target's answers.
    """

    output: Path | None = None
    memory: int | None = None
    size: int | None = None
    quantizations: Sequence[str] = ()
    keep_layers: bool = False
    pass_s: float | None = None
    tokens: int = 64
    threads: int | None = None


def make_for(target: str, options: MakeOptions, on_progress: Progress | None = None) -> MadeDrafter:
    """Search for, make, measure and register a drafter; resumes where an earlier call ended.

    Raises:
        UsageError: an unknown quantization, or a size that nothing can meet.
        EdgeSpecError: the target cannot be found or loaded, the disk is too small, a file cannot be written.
    """
    report = on_progress or no_progress
    _check(options)
    header = read_header(catalog.find(target, on_progress))
    folder = _work_folder(header)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}.", "Check its permissions.") from error
    for place in (drafters_folder(), folder):
        remove_abandoned(place)
    state = _state(header, options)

    def report_writing(what: str, part: float) -> None:
        report(what, part * 0.2)

    written = state.written(
        FreeMemory.read().budget(options.memory),
        lambda: _generate_texts(header, options, PROMPTS, options.tokens, report_writing),
        lambda: _generate_texts(header, options, PROMPTS[:_FEW_PROMPTS], _FEW_TOKENS, report_writing).cost,
    )
    choosing, judging = written.samples[::2], written.samples[1::2]
    cost = _cost(written.cost, options)
    meter = RecipeMeter(header, folder, state, choosing, options.threads)
    meter.on_progress = report
    quantizations = options.quantizations or _usual(header)
    layers = 0 if options.keep_layers else header.block_count or 0
    chosen = search(meter, quantizations, layers, cost, lambda what, part: report(what, 0.2 + part * 0.7))
    if options.size is not None and chosen.n_bytes > options.size:
        raise UsageError(
            f"No drafter of at most {options.size:,} bytes was found; the smallest has {chosen.n_bytes:,}.",
            "Raise --size, or choose fewer bits with --quantization.",
        )
    if chosen.recipe == Recipe(KEEP):
        raise BackendError(
            f"Nothing to change in {header.path.name}.",
            "Name a quantization, or leave out --keep-layers.",
        )
    output = options.output or drafters_folder() / _file_name(header, chosen.recipe)
    report(f"Making {chosen.recipe}", 0.92)
    make_drafter(
        header.path,
        output,
        quantization=chosen.recipe.quantization,
        drop_layers=chosen.recipe.dropped,
        threads=options.threads,
    )
    report("Measuring the result", 0.95)
    with AgreementMeter(output, judging, repack=True) as reader:
        agreement, step_s = reader.agreement(judging), reader.step_s()
    meter.close()
    PairRegistry().add(
        DrafterPair(
            header.fingerprint,
            header.path.name,
            str(output.absolute()),
            MADE,
            agreement.top1,
            agreement.top4,
            agreement.tokens,
            str(chosen.recipe),
        )
    )
    n_bytes = output.stat().st_size
    return MadeDrafter(
        header.path,
        output,
        chosen.recipe,
        agreement,
        step_s,
        n_bytes,
        chosen,
        cost.pass_s,
        cost.tokens_per_second(agreement, step_s, n_bytes),
    )


def kept_of(target: str, options: MakeOptions) -> str:
    """Describe what an interrupted `make_for` left, and how to continue."""
    try:
        kept = _state(read_header(catalog.find(target, fetch=False)), options).described
    except EdgeSpecError:  # not downloaded yet
        kept = ""
    return f"Kept: {kept}. Run the same command to continue." if kept else "Nothing was measured yet."


def _work_folder(header: GGUFHeader) -> Path:
    return drafters_folder() / "work" / header.fingerprint[:16]


def _state(header: GGUFHeader, options: MakeOptions) -> RecipeState:
    return RecipeState(_work_folder(header) / f"state-{options.tokens}.json")


def _check(options: MakeOptions) -> None:
    for name in options.quantizations:
        if name != KEEP and name not in QUANTIZATIONS:
            raise UsageError(
                f"There is no quantization '{name}'.", f"Choose from {KEEP}, {', '.join(QUANTIZATIONS)}."
            )
    if options.pass_s is not None and not 0 < options.pass_s < 3600:
        limit = "below 3600" if options.pass_s > 0 else "positive"
        raise UsageError(f"--pass-seconds must be {limit}, not {options.pass_s:g}.")
    if not 8 <= options.tokens <= 512:
        raise UsageError(f"--tokens must be from 8 to 512, not {options.tokens}.")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise OutputError(f"There is no folder {options.output.absolute().parent}.", "Create it first.")


def _generate_texts(
    header: GGUFHeader, options: MakeOptions, prompts: Sequence[str], tokens: int, on_progress: Progress
) -> SampleAnswers:
    from edgespec.loading.load import load

    with load(
        header.path,
        draft="lookup",
        context=_CONTEXT,
        memory=options.memory,
        threads=options.threads,
        on_progress=on_progress,
    ) as engine:
        return write_sample_answers(engine, prompts, tokens, on_progress)


def _cost(cost: PassCost, options: MakeOptions) -> CostModel:
    pass_s = options.pass_s or cost.pass_s
    if not cost.streamed_bytes or not cost.read_rate:
        return CostModel(pass_s, limit=options.size)
    read_s = min(read_seconds(cost.streamed_bytes, cost.read_rate), pass_s)
    return CostModel(pass_s, cost.read_rate, options.size, read_s)


def _usual(header: GGUFHeader) -> tuple[str, ...]:
    """Low-bit types; and the target's own types, if it is a single file of few bits already."""
    elements = sum(_product(tensor.shape) for tensor in header.tensors)
    bits = 8 * header.tensor_bytes / max(elements, 1)
    whole = len(split_paths(header)) == 1
    return (KEEP, *_LOW_BITS) if whole and bits < 6 else _LOW_BITS


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _file_name(header: GGUFHeader, recipe: Recipe) -> str:
    stem = re.sub(r"-00001-of-\d{5}$", "", header.path.stem)
    less = f"-less-{'-'.join(map(str, recipe.dropped))}" if recipe.dropped else ""
    return f"{stem}-draft-{recipe.quantization}{less}"[:120] + f"-{header.fingerprint[:8]}.gguf"
