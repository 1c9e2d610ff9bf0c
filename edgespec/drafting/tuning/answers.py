"""Prompts for the target, and its answers with what it might have said instead, in a file.

Bundled prompts are of several categories, beside a person's own. Held-out prompts are never trained on.
Bundled ones are about subjects of their own, so that a drafter cannot know them from the same question in
another form.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafting.agreement import SampleAnswer
from edgespec.engine.engine import Engine
from edgespec.engine.requests import Request
from edgespec.errors import ContextLengthError, OutputError, UsageError
from edgespec.files.blocks import BlockFile
from edgespec.generation.config import GenerationConfig
from edgespec.speculation.top import log_sums, top
from edgespec.speculation.tree import Acceptance, FloatArray, IntArray, TokenTree

OWN = "own"
_HELD_OUT_SUBJECTS = 2  # of each category
_HELD_OUT_SHARE = 8  # one in so many of a person's own
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """A question, and the category it belongs to."""

    text: str
    category: str


@dataclass(frozen=True)
class PromptSplit:
    """Prompts to learn from, in the order in which they are answered, and held-out ones."""

    training: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def bundled_prompts() -> PromptSplit:
    """Questions of every category in turn, with every form of a question and every subject early on."""
    source = resources.files("edgespec.drafting.tuning").joinpath("prompts.json")
    categories = json.loads(source.read_text(encoding="utf-8"))
    training: list[list[Prompt]] = []
    held_out: list[list[Prompt]] = []
    for category, parts in categories.items():
        forms, subjects = parts["forms"], parts["subjects"]
        kept, learned = subjects[:_HELD_OUT_SUBJECTS], subjects[_HELD_OUT_SUBJECTS:]
        held_out.append(
            [Prompt(forms[i % len(forms)].format(subject), category) for i, subject in enumerate(kept)]
        )
        training.append(
            [
                Prompt(forms[(i + turn) % len(forms)].format(subject), category)
                for turn in range(len(forms))
                for i, subject in enumerate(learned)
            ]
        )
    return PromptSplit(_in_turn(training), _in_turn(held_out))


def with_own(prompts: PromptSplit, own: list[Prompt]) -> PromptSplit:
    """A person's prompts before the bundled ones, some of them held out."""
    kept = own[_HELD_OUT_SHARE - 1 :: _HELD_OUT_SHARE]
    held = set(kept)
    learned = [prompt for prompt in own if prompt not in held]
    return PromptSplit((*learned, *prompts.training), (*kept, *prompts.held_out))


def read_prompts(path: Path) -> list[Prompt]:
    """A person's prompts: one a line, as plain text, or as JSON with a "prompt" (perhaps a "category")."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB.", "Give a smaller file.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "Name a file of prompts.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", "Write one prompt per line.") from error
    found: dict[str, Prompt] = {}  # by text: what is held out must not be learned from under another category
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read_line(path, number, line)
            found.setdefault(prompt.text, prompt)
    if not found:
        raise UsageError(f"{path} contains no prompts.", "Write one prompt per line.")
    return list(found.values())


def _read_line(path: Path, number: int, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(line.strip(), OWN)
    try:
        record = json.loads(line)
    except ValueError:
        return Prompt(line.strip(), OWN)  # a question may begin with a brace
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(
            f'Line {number} of {path} has no "prompt".', 'Write plain text, or JSON with a "prompt".'
        )
    return Prompt(prompt, str(record.get("category", OWN)))


def _in_turn(groups: list[list[Prompt]]) -> tuple[Prompt, ...]:
    longest = max(map(len, groups))
    return tuple(group[i] for i in range(longest) for group in groups if i < len(group))


TOP = 32  # tokens of each distribution that are kept
_VERSION = 1


@dataclass(frozen=True)
class TargetAnswer:
    """An answer of the target, and what else it might have said.

    Row i of the distributions follows the prompt and the first i tokens of the answer; if the answer ended by
    itself, the last row, after all of it, is the one that chose the end.
    """

    prompt: Prompt
    text: SampleAnswer
    top: IntArray  # (rows, TOP) the most likely tokens
    # (rows, TOP) their log-probabilities; all other tokens share what is left of 1
    logprobs: NDArray[np.float16]

    def to_bytes(self) -> bytes:
        """Serialize as a block of the file."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            prompt=np.array([self.prompt.text, self.prompt.category]),
            read=np.array(self.text.prompt, np.int32),
            said=np.array(self.text.answer, np.int32),
            top=self.top,
            logprobs=self.logprobs,
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, block: bytes) -> TargetAnswer:
        """Parse a block of the file."""
        with np.load(io.BytesIO(block), allow_pickle=False) as arrays:
            words, category = arrays["prompt"].tolist()
            text = SampleAnswer(tuple(arrays["read"].tolist()), tuple(arrays["said"].tolist()))
            return cls(Prompt(words, category), text, arrays["top"], arrays["logprobs"])


class AnswerFile:
    """The answers of one target under one setting, in a file.

    Args:
        fingerprint: of the target's header.
        tokens: most tokens of an answer.
    """

    def __init__(self, path: Path, fingerprint: str, tokens: int) -> None:
        self._path = path
        label = json.dumps({"version": _VERSION, "target": fingerprint, "tokens": tokens, "top": TOP})
        try:
            self._file = BlockFile(path, label.encode())
            self._answers = {answer.prompt.text: answer for answer in self._decoded()}
        except OSError as error:
            raise self._failed(error) from error

    def of(self, prompts: Iterable[Prompt]) -> list[TargetAnswer]:
        """The answers to these prompts that are there, in the order of the prompts."""
        return [self._answers[prompt.text] for prompt in prompts if prompt.text in self._answers]

    def unanswered(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if prompt.text not in self._answers]

    def add(self, answer: TargetAnswer) -> None:
        try:
            self._file.append(answer.to_bytes())
        except OSError as error:
            raise self._failed(error) from error
        self._answers[answer.prompt.text] = answer

    def _decoded(self) -> Iterator[TargetAnswer]:
        for block in self._file.blocks():
            try:
                yield TargetAnswer.from_bytes(block)
            except (ValueError, KeyError, zipfile.BadZipFile):
                return  # not written by this version

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self._path} cannot be used: {error.strerror or error}.", "Check its permissions, and the disk."
        )


def collect_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    tokens: int,
    may_continue: Callable[[int], bool] = lambda index: True,
    on_pass: Callable[[], None] = lambda: None,
) -> Generator[TargetAnswer, None, None]:
    """Generate the target's answers to prompts, many sequences a pass, and yield each as it is finished.

    Prompts that do not fit the context are passed over. An answer may be nothing but its end.

    Args:
        tokens: most tokens of an answer.
        may_continue: whether the prompt of this index shall still be asked; the first that shall not ends it.
        on_pass: called at least once a pass.
    """
    asked: dict[int, tuple[int, ...]] = {}
    collected: dict[int, DistributionRows] = {}
    config = GenerationConfig(max_tokens=tokens)

    def requests() -> Iterator[Request]:
        for index, prompt in enumerate(prompts):
            if not may_continue(index):
                return
            with suppress(ContextLengthError):
                asked[index] = tuple(engine.encoder.encode(prompt.text))
                collected[index] = rows = DistributionRows()
                yield Request(asked[index], config, key=index, on_accept=rows.add)

    with closing(engine.stream_many(requests())) as events:
        for event in events:
            on_pass()
            if event.error is not None and not isinstance(event.error, ContextLengthError):
                raise event.error
            if not event.is_last:
                continue
            index: int = event.request.key
            rows, text = collected.pop(index), asked.pop(index)
            answer = event.chunk.generation if event.chunk is not None else None
            if answer is None or answer.finish_reason == "cancelled":
                continue
            kept = rows.first(len(answer.tokens) + (answer.finish_reason == "stop"))
            yield TargetAnswer(prompts[index], SampleAnswer(text, tuple(answer.tokens)), *kept)


class DistributionRows:
    """The target's distributions at the tokens of one answer so far."""

    def __init__(self) -> None:
        self._top: list[IntArray] = []
        self._logprobs: list[NDArray[np.float16]] = []

    def add(self, logits: FloatArray, _tree: TokenTree, accepted: Acceptance) -> None:
        """Add those of a pass; see `DecodingText.on_accept`."""
        logits = logits[list(accepted.path)]  # a token was chosen after each of these nodes
        best, tokens = top(logits, TOP)
        logprobs = best - best[:, :1] - log_sums(logits, best[:, :1])
        self._top.append(tokens)
        self._logprobs.append(logprobs.astype(np.float16))

    def first(self, count: int) -> tuple[IntArray, NDArray[np.float16]]:
        """(at most count, TOP) the most likely tokens, and their log-probabilities."""
        return np.concatenate(self._top)[:count], np.concatenate(self._logprobs)[:count]
