"""`edgespec draft tune`: a drafter that learns from its target's own answers.

The target answers prompts, and what it might have said instead is kept of every token. A small model is
trained towards that, written in the quantization that it had, measured on answers that it has not seen, and
registered if no drafter known is better. An interrupted run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

from edgespec.base.progress import Progress, no_progress
from edgespec.drafting.agreement import PROMPTS, CostModel, PassCost, SampleAnswer, write_sample_answers
from edgespec.drafting.make import (
    MakeOptions,
    SavedMeasurements,
    check_output,
    make_for,
    work_folder,
    working_in,
)
from edgespec.drafting.pair_check import check_sizes
from edgespec.drafting.tuning.answers import (
    AnswerFile,
    PromptSplit,
    TargetAnswer,
    bundled_prompts,
    collect_answers,
    read_prompts,
    with_own,
)
from edgespec.drafting.tuning.evaluation import Evaluation, evaluate
from edgespec.drafting.tuning.network.shape import TrainedExtent, extent_for
from edgespec.drafting.tuning.network.weights import check_tunable, load_weights, write_weights
from edgespec.drafting.tuning.options import LEAST_ANSWERS, TrainingRecord, TunedDrafter, TuneOptions, check
from edgespec.engine.engine import Engine
from edgespec.errors import BackendError, EdgeSpecError, PairingError
from edgespec.files.writing import atomic_large_write, remove_abandoned, termination_raises, writing_to
from edgespec.llama.runtime.model import Model
from edgespec.llama.tokenizer.compatibility import differs
from edgespec.machine.cores import default_threads
from edgespec.machine.memory import FreeMemory, available_memory
from edgespec.models.gguf.header import read_header
from edgespec.models.gguf.types import GGUFHeader
from edgespec.models.hub import catalog
from edgespec.models.hub.drafter_choice import candidates
from edgespec.models.hub.registry import MADE, DrafterPair, PairRegistry, drafters_folder
from edgespec.processes.children import environment_set

_CONTEXT = 4096  # of the target, shared by the answers in a pass
_ANSWERING_SHARE = 1 / 3  # of the time, at most
_FEW_PROMPTS, _FEW_TOKENS = 2, 24  # enough to time passes
_SAME_MEMORY = 0.05  # share by which free memory varies between runs
# OpenMP threads that spin while they wait for each other make a step take many times as long as soon as
# anything else wants their cores. The library reads this when it is loaded.
_SLEEPING_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def tune(target: str, options: TuneOptions, on_progress: Progress | None = None) -> TunedDrafter:
    """Tune a drafter for a target, measure it, and register it if none known is better."""
    report = on_progress or no_progress
    check(options)
    prompts = bundled_prompts()
    if options.prompts is not None:
        prompts = with_own(prompts, read_prompts(options.prompts))
    header = read_header(catalog.find(target, on_progress))
    check_output(header, options.output)
    start = choose_start(header, options, report)
    check_output(start, options.output)
    extent = extent_for(start, check_tunable(start), available_memory())
    with termination_raises(), working_in(work_folder(header)):
        return _Tuning(header, start, extent, prompts, options, report).run()


class _Tuning:
    """One run of `tune`."""

    def __init__(
        self,
        target: GGUFHeader,
        start: GGUFHeader,
        extent: TrainedExtent,
        prompts: PromptSplit,
        options: TuneOptions,
        report: Progress,
    ) -> None:
        self._target, self._start, self._prompts = target, start, prompts
        self._options, self._report = options, report
        parts: list[object] = [target.fingerprint, start.fingerprint, start.file_bytes]
        parts += [options.tokens, options.answers]
        parts += [prompt.text for prompt in prompts.training]
        self._label = "tuning-" + hashlib.blake2b(json.dumps(parts).encode(), digest_size=5).hexdigest()
        self._folder = work_folder(target)
        remove_abandoned(self._folder, ".*.partial")
        self._state = SavedMeasurements(self._folder / f"{self._label}.json")
        if "first" not in self._state.values:  # it must not change with the memory that is free later
            self._state.save("first", extent.first)
        self._extent = TrainedExtent(self._state.values["first"])
        self._answers = AnswerFile(
            self._folder / f"tuning-{options.tokens}.answers", target.fingerprint, options.tokens
        )

    def run(self) -> TunedDrafter:
        cost = self._answered()
        learned = self._learned()
        held_out = [a.text for a in self._answers.of(self._prompts.held_out) if a.text.answer]
        if len(learned) < LEAST_ANSWERS or not held_out:
            raise BackendError(
                f"{self._target.path.name} gave {len(learned)} usable answers, too few to learn from.",
                "Raise --minutes, or name other prompts with --prompts FILE.",
            )
        trained, written = self._train(learned)
        tuned = self._register(trained, *self._evaluate(written, held_out, cost))
        for path in self._folder.glob(f"*{self._label}*"):
            path.unlink(missing_ok=True)
        return tuned

    def _answered(self) -> CostModel:
        """Generate the answers that are still missing; returns the cost of a pass, measured now or before."""
        room = FreeMemory.read().budget(self._options.memory)
        known = self._state.values.get("passes", {})
        knows_cost = (
            self._options.pass_s is not None or abs(known.get("memory", 0) - room) <= _SAME_MEMORY * room
        )
        if not knows_cost or self._wanted() or self._answers.unanswered(self._prompts.held_out):
            from edgespec.loading.load import load

            with load(
                self._target.path,
                draft="none",
                context=_CONTEXT,
                memory=self._options.memory,
                threads=self._options.threads,
                on_progress=self._report,
            ) as engine:
                self._collect_answers(engine)
                if not knows_cost:
                    cost = write_sample_answers(engine, PROMPTS[:_FEW_PROMPTS], _FEW_TOKENS).cost
                    self._state.save("passes", {"memory": room, **asdict(cost)})
        if self._options.pass_s is not None:
            return CostModel(self._options.pass_s)
        values = {name: value for name, value in self._state.values["passes"].items() if name != "memory"}
        return CostModel.of(PassCost(**values))

    @property
    def _answering_s(self) -> float:
        return float(self._state.values.get("answering_s", 0.0))

    def _wanted(self) -> int:
        """Return the number of answers to ask for still: 0 if there is no time, unless there are too few."""
        has_time = self._answering_s < 60 * self._options.minutes * _ANSWERING_SHARE
        if not has_time and len(self._learned()) >= LEAST_ANSWERS:
            return 0
        most = self._options.answers or len(self._prompts.training)
        return len(self._answers.unanswered(self._prompts.training[:most]))

    def _collect_answers(self, engine: Engine) -> None:
        held_out = self._answers.unanswered(self._prompts.held_out)
        most = self._options.answers or len(self._prompts.training)
        wanted = self._answers.unanswered(self._prompts.training[:most])
        limit = 60 * self._options.minutes * _ANSWERING_SHARE
        total = len(held_out) + len(wanted)
        before, begun = self._answering_s, time.monotonic()

        def may_continue(index: int) -> bool:
            has_time = before + time.monotonic() - begun < limit
            needed = index < len(held_out) + LEAST_ANSWERS
            return needed or self._options.steps is not None or has_time

        done = 0

        def on_pass() -> None:
            in_time = 0.0 if self._options.steps is not None else (time.monotonic() - begun + before) / limit
            self._report(f"The target answers, {done} so far", 0.3 * min(max(in_time, done / total), 1.0))

        asked = [*held_out, *wanted]
        with closing(collect_answers(engine, asked, self._options.tokens, may_continue, on_pass)) as answers:
            for answer in answers:
                self._answers.add(answer)
                self._state.save("answering_s", before + time.monotonic() - begun)
                done += 1

    def _learned(self) -> list[TargetAnswer]:
        most = self._options.answers or len(self._prompts.training)
        return list(self._answers.of(self._prompts.training[:most]))

    def _train(self, learned: list[TargetAnswer]) -> tuple[TrainingRecord, Path]:
        with environment_set(_SLEEPING_THREADS):
            import torch

        from edgespec.drafting.tuning.network.network import Network
        from edgespec.drafting.tuning.training import Trainer

        self._report("Loading the drafter to tune", 0.3)
        torch.set_num_threads(self._options.threads or default_threads())
        loaded = load_weights(self._start.path)
        network = Network(loaded.shape, loaded.weights, self._extent)
        checkpoint = self._folder / f"{self._label}.pt"
        trainer = Trainer(network, learned, checkpoint, self._label)
        wanted = self._options.steps
        most_s = max(60 * self._options.minutes - self._answering_s, 60 * self._options.minutes / 2)
        trainer.train(
            lambda steps, seconds: seconds / most_s if wanted is None else steps / wanted,
            lambda what, part: self._report(what, 0.3 + 0.55 * min(part, 1.0)),
        )
        trained = TrainingRecord(
            len(learned),
            sum(len(answer.top) for answer in learned),
            trainer.steps,
            trainer.seconds,
            trainer.loss or 0.0,
            trainer.rate,
        )
        self._report("Writing the drafter", 0.86)
        # The same training gives the same file, so no times.
        origin = {"target": self._target.fingerprint, "start": self._start.fingerprint}
        note = json.dumps(origin | {"steps": trained.steps, "answers": trained.answers})
        changed = network.changed()
        del trainer, network  # gradients and moments take more than what is loaded to write the result
        path = self._folder / f"{self._label}.gguf"
        with writing_to(path, "Free some space on that disk."):
            partial = path.with_name(f"{path.name}.partial")
            with atomic_large_write(path, partial):
                write_weights(self._start.path, partial, changed, note)
        return trained, path

    def _evaluate(
        self, written: Path, samples: list[SampleAnswer], cost: CostModel
    ) -> tuple[Evaluation, Evaluation, Evaluation | None]:
        """The start, the tuned drafter, and the best drafter known if that is better."""

        def speed(evaluation: Evaluation) -> float:
            return evaluation.tokens_per_second

        self._report("Measuring the gain", 0.88)
        before = evaluate(self._start.path, samples, cost)
        after = evaluate(written, samples, cost, like=before)
        best = max([before, *self._rivals(samples, cost)], key=speed)
        return before, after, best if speed(best) >= speed(after) else None

    def _rivals(self, samples: list[SampleAnswer], cost: CostModel) -> Iterator[Evaluation]:
        """The other drafters known of the target that draft by tokens, and can be loaded."""
        for candidate in candidates(self._target):
            if not candidate.path.samefile(self._start.path):
                with suppress(EdgeSpecError):
                    if not difference(self._target.path, candidate.path):
                        yield evaluate(candidate.path, samples, cost)

    def _register(
        self, trained: TrainingRecord, before: Evaluation, after: Evaluation, rival: Evaluation | None
    ) -> TunedDrafter:
        output = self._options.output
        if rival is not None and output is None:
            return TunedDrafter(self._target.path, None, before, after, rival, trained)
        name = self._start.path.stem.partition("-tuned-")[0]
        path = output or drafters_folder() / f"{name[:100]}-tuned-{self._label.rpartition('-')[2]}.gguf"
        with writing_to(path, "Choose another folder."):
            if output is None:
                after.path.replace(path)
            else:
                _copy(after.path, path)
        if rival is None:
            agreement = after.agreement
            PairRegistry().add(
                DrafterPair(
                    self._target.fingerprint,
                    self._target.path.name,
                    str(path.absolute()),
                    MADE,
                    agreement.top1,
                    agreement.top4,
                    agreement.tokens,
                    f"{self._start.path.stem} tuned for {trained.seconds / 60:.0f} min",
                    preferred=True,
                )
            )
        return TunedDrafter(self._target.path, path, before, replace(after, path=path), rival, trained)


def _copy(source: Path, destination: Path) -> None:
    import shutil

    partial = destination.with_name(destination.name + ".partial")
    with atomic_large_write(destination, partial) as file, source.open("rb") as original:
        shutil.copyfileobj(original, file)


def choose_start(target: GGUFHeader, options: TuneOptions, report: Progress) -> GGUFHeader:
    """The drafter to begin with: the one that was named, the best one known, or one that is made now."""
    if options.start is not None:
        start = read_header(catalog.find(options.start, report))
        check_sizes(target, start)
        check_tunable(start)
        if found := difference(target.path, start.path):
            raise PairingError(
                f"The vocabularies of {start.path.name} and the target differ ({found}).",
                "Only a drafter that drafts by tokens can be tuned; edgespec draft make TARGET makes one.",
            )
        return start
    for candidate in candidates(target):
        with suppress(EdgeSpecError):
            start = read_header(candidate.path)
            check_sizes(target, start)
            check_tunable(start)
            if not difference(target.path, start.path):
                return start
    check_tunable(target)  # before the minutes that making takes: what is made of it is of the same kind
    report("No drafter yet: making one", 0.0)
    make = MakeOptions(memory=options.memory, threads=options.threads)
    return read_header(make_for(str(target.path), make, report).path)


def difference(target: Path, drafter: Path) -> str:
    """Describe how the vocabularies of two models differ; empty if token ids mean the same in both."""
    with Model(target, vocabulary_only=True) as large, Model(drafter, vocabulary_only=True) as small:
        return differs(large.vocabulary, small.vocabulary)
