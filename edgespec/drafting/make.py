"""`edgespec draft make`: the quantization of a target that makes it fastest as its drafter.

The target generates text. Each quantization is made, and measured on one half of that text; the best one is
measured on the other half and registered. A target larger than memory is streamed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from edgespec.base.progress import Progress, no_progress
from edgespec.base.units import readable
from edgespec.drafting.agreement import (
    PROMPTS,
    Agreement,
    AgreementMeter,
    CostModel,
    PassCost,
    SampleAnswer,
    SampleAnswers,
    write_sample_answers,
)
from edgespec.errors import EdgeSpecError, OutputError, UsageError
from edgespec.files.writing import (
    atomic_write,
    followed,
    remove_abandoned,
    require_replaceable,
    writing_to,
)
from edgespec.llama.quantize import QUANTIZATIONS, make_drafter, refuse_to_overwrite
from edgespec.machine.memory import FreeMemory
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.split_files import split_paths
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.registry import MADE, DrafterPair, PairRegistry, drafters_folder

_CONTEXT = 1024
_FEW_PROMPTS, _FEW_TOKENS = 2, 24  # enough to time passes, if the text itself is known
_LOW_BITS = ("q4_0", "q3_k_m", "q2_k")


@dataclass(frozen=True)
class Candidate:
    """A quantization of the target, measured as its drafter."""

    quantization: str
    agreement: Agreement
    step_s: float  # of a draft step, which reads a few tokens
    n_bytes: int


@dataclass(frozen=True)
class MadeDrafter:
    """A drafter that was made and registered."""

    target: Path
    path: Path
    measured: Candidate  # on text that was not used to choose it
    expected_tokens_per_second: float  # by which it was chosen
    pass_s: float  # of the target, for which it was chosen
    tokens_per_second: float  # of the target with it, as measured

    @property
    def gain(self) -> float:
        """Speed-up over plain decoding."""
        return self.tokens_per_second * self.pass_s

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "path": str(self.path),
            "quantization": self.measured.quantization,
            "agreement": asdict(self.measured.agreement),
            "step_s": self.measured.step_s,
            "bytes": self.measured.n_bytes,
            "pass_s": self.pass_s,
            "expected_tokens_per_second": self.expected_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "gain": self.gain,
        }


@dataclass(frozen=True)
class MakeOptions:
    output: Path | None = None
    memory: int | None = None  # bytes, while the target generates; None means what is available
    size: int | None = None  # most bytes of the drafter; None leaves it to the choice
    quantizations: Sequence[str] = ()  # to choose from; if empty, the usual ones
    pass_s: float | None = None  # of the target, to optimize for; None measures it
    tokens: int = 64  # of each of the target's answers
    threads: int | None = None


def make_for(target: str, options: MakeOptions, on_progress: Progress | None = None) -> MadeDrafter:
    """Make, measure and register a drafter; resumes where an earlier call ended."""
    report = on_progress or no_progress
    _check(options)
    header = read_header(catalog.find(target, on_progress))
    check_output(header, options.output)
    folder = work_folder(header)
    with working_in(folder):
        state = _state(header, options)
        written = state.written(
            FreeMemory.read().budget(options.memory),
            lambda: _generate_texts(header, options, PROMPTS, options.tokens, report),
            lambda: _generate_texts(header, options, PROMPTS[:_FEW_PROMPTS], _FEW_TOKENS, report).cost,
        )
        choosing, judging = written.samples[::2], written.samples[1::2]
        cost = CostModel.of(written.cost, options.pass_s)

        def speed(one: Candidate) -> float:
            return cost.tokens_per_second(one.agreement, one.step_s, one.n_bytes)

        quantizations = options.quantizations or _LOW_BITS
        tried: list[Candidate] = []
        for number, quantization in enumerate(quantizations):
            report(f"Trying {quantization}", 0.2 + 0.7 * number / len(quantizations))
            tried.append(_measured(header, quantization, folder, state, choosing, options.threads))
        chosen = max(_within(tried, options.size), key=lambda one: (speed(one), -one.n_bytes))
        output = options.output or drafters_folder() / _file_name(header, chosen.quantization)
        report(f"Measuring {chosen.quantization}", 0.95)
        made = _made(header, chosen.quantization, folder, options.threads)
        with AgreementMeter(made, judging) as meter:
            measured = Candidate(
                chosen.quantization, meter.agreement(judging), meter.step_s(), made.stat().st_size
            )
        _move(made, output)
        for left in folder.glob("*.gguf"):
            left.unlink(missing_ok=True)
    _register(header, output, measured)
    return MadeDrafter(header.path, output, measured, speed(chosen), cost.pass_s, speed(measured))


def kept_of(target: str, options: MakeOptions) -> str:
    """Describe what an interrupted `make_for` left, and how to continue."""
    try:
        kept = _state(read_header(catalog.find(target, fetch=False)), options).described
    except EdgeSpecError:  # not downloaded yet
        kept = ""
    return f"Kept: {kept}. Run the same command to continue." if kept else "Nothing was measured yet."


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Have a work folder for oneself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}.", "Check its permissions.") from error
    try:
        with FileLock(folder / "lock", timeout=0):
            for place in (drafters_folder(), folder):
                remove_abandoned(place)
            yield
    except Timeout as error:
        raise UsageError(
            "Another 'edgespec draft' command for this target is running.", "Wait until it has ended."
        ) from error


def _measured(
    target: GGUFHeader,
    quantization: str,
    folder: Path,
    state: SavedMeasurements,
    samples: Sequence[SampleAnswer],
    threads: int | None,
) -> Candidate:
    """A candidate, as measured now or in an earlier run."""
    key = f"{CANDIDATE}{quantization}"
    if key not in state.values:
        path = _made(target, quantization, folder, threads)
        with AgreementMeter(path, samples) as meter:
            found = {"agreement": asdict(meter.agreement(samples)), "step_s": meter.step_s()}
        state.save(key, found | {"n_bytes": path.stat().st_size})
    values = state.values[key]
    return Candidate(quantization, Agreement(**values["agreement"]), values["step_s"], values["n_bytes"])


def _made(target: GGUFHeader, quantization: str, folder: Path, threads: int | None) -> Path:
    """The target in this quantization, in the work folder; made if it is not there."""
    path = folder / f"{quantization}.gguf"
    if not path.exists():
        needed = sum(part.stat().st_size for part in split_paths(target))
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OutputError(
                f"{folder} needs {readable(needed)} of disk space, but {readable(free)} is free.",
                "Free some space, or set XDG_DATA_HOME to a folder on a larger disk.",
            )
        make_drafter(target.path, path, quantization=quantization, threads=threads)
    return path


def _within(tried: Sequence[Candidate], size: int | None) -> list[Candidate]:
    """The candidates that are small enough."""
    fitting = [one for one in tried if size is None or one.n_bytes <= size]
    if not fitting:
        smallest = min(one.n_bytes for one in tried)
        raise UsageError(
            f"No drafter has at most {size:,} bytes; the smallest has {smallest:,}.",
            "Raise --size, or choose fewer bits with --quantization.",
        )
    return fitting


def _move(made: Path, output: Path) -> None:
    """Put the result in its place, which may be on another disk, or where a link leads to."""
    output = followed(output)
    partial = output.with_name(output.name + ".partial")
    with writing_to(output, "Choose an existing folder that you can write to."):
        try:
            shutil.move(made, partial)
            partial.replace(output)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _register(target: GGUFHeader, output: Path, measured: Candidate) -> None:
    PairRegistry().add(
        DrafterPair(
            target.fingerprint,
            target.path.name,
            str(output.absolute()),
            MADE,
            measured.agreement.top1,
            measured.agreement.top4,
            measured.agreement.tokens,
            measured.quantization,
        )
    )


def work_folder(header: GGUFHeader) -> Path:
    return drafters_folder() / "work" / header.fingerprint[:16]


def _state(header: GGUFHeader, options: MakeOptions) -> SavedMeasurements:
    return SavedMeasurements(work_folder(header) / f"state-{options.tokens}.json")


def _check(options: MakeOptions) -> None:
    for name in options.quantizations:
        if name not in QUANTIZATIONS:
            raise UsageError(
                f"There is no quantization '{name}'.", f"Choose from {', '.join(QUANTIZATIONS)}."
            )
    if options.pass_s is not None and not 0 < options.pass_s < 3600:
        limit = "below 3600" if options.pass_s > 0 else "positive"
        raise UsageError(f"--pass-seconds must be {limit}, not {options.pass_s:g}.")
    if not 8 <= options.tokens <= 512:
        raise UsageError(f"--tokens must be from 8 to 512, not {options.tokens}.")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise OutputError(f"There is no folder {options.output.absolute().parent}.", "Create it first.")


def check_output(source: GGUFHeader, output: Path | None) -> None:
    """Refuse to put a drafter in the place of what it is made from, of a device or of a pipe."""
    if output is None:
        return
    for part in split_paths(source):
        refuse_to_overwrite(part, output)
    with writing_to(output, "Give another name."):
        require_replaceable(output)


def _generate_texts(
    header: GGUFHeader, options: MakeOptions, prompts: Sequence[str], tokens: int, on_progress: Progress
) -> SampleAnswers:
    from edgespec.loading.load import load

    def report(what: str, part: float) -> None:
        on_progress(what, part * 0.2)

    with load(
        header.path,
        draft="lookup",
        context=_CONTEXT,
        memory=options.memory,
        threads=options.threads,
        on_progress=report,
    ) as engine:
        return write_sample_answers(engine, prompts, tokens, report)


def _file_name(header: GGUFHeader, quantization: str) -> str:
    stem = re.sub(r"-00001-of-\d{5}$", "", header.path.stem)
    return f"{stem}-draft-{quantization}"[:120] + f"-{header.fingerprint[:8]}.gguf"


CANDIDATE = "candidate "
"""Prefix of the keys of measured drafters."""

_SAME_MEMORY = 0.05  # share by which free memory varies between runs


class SavedMeasurements:
    """The measurements so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.values = {}

    @property
    def described(self) -> str:
        """The measurements in words; empty if there are none."""
        count = sum(key.startswith(CANDIDATE) for key in self.values)
        measured = f" and {count} measured candidate{'' if count == 1 else 's'}" if count else ""
        return f"the target's sample text{measured}" if "written" in self.values else ""

    def save(self, key: str, value: Any) -> None:
        self.values[key] = value
        with atomic_write(self._path) as file:
            file.write(json.dumps(self.values).encode())

    def written(
        self, memory: int, write: Callable[[], SampleAnswers], measure: Callable[[], PassCost]
    ) -> SampleAnswers:
        """The texts that the target generated, and the cost of its passes: saved, or measured now.

        Args:
            memory: bytes that the target has. They change its passes, but not its text.
            write: generates the texts.
            measure: generates just enough to time passes.
        """
        if "written" not in self.values:
            written = write()
            self.save("written", {"texts": [asdict(sample) for sample in written.samples]})
            self.save("passes", {"memory": memory, **asdict(written.cost)})
        known = self.values.get("passes", {})
        if abs(known.get("memory", 0) - memory) > _SAME_MEMORY * memory:
            self.save("passes", {"memory": memory, **asdict(measure())})
        samples = tuple(
            SampleAnswer(tuple(sample["prompt"]), tuple(sample["answer"]))
            for sample in self.values["written"]["texts"]
        )
        cost = {name: value for name, value in self.values["passes"].items() if name != "memory"}
        return SampleAnswers(samples, PassCost(**cost))
