"""An engine that only talks, and what its tests read and write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgespec.cli.reloading import LOST
from edgespec.config import Config
from edgespec.engine.requests import Event, RequestSource
from edgespec.errors import ContextLengthError, EdgeSpecError
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation, PassRecord

ANSWER = "Blue as ever."


class TalkingEngine:
    """Answers every prompt with the same words, one a pass."""

    has_chat_template = True
    prompt_files = None
    keys = None
    can_think = True
    sees_images = False
    context = 4096
    vocabulary_size = 100
    description = "talker, drafted by nobody"
    notes = ("It only talks.",)
    warnings: tuple[str, ...] = ()
    target = SimpleNamespace(model=SimpleNamespace(path=Path("talker.gguf")))

    def __init__(self) -> None:
        self.words = ["Blue", " as", " ever."]
        self.thought: list[str] = []
        self.asked: list[tuple[Any, GenerationConfig, bool]] = []
        self.loaded_with: dict[str, Any] = {}
        self.last_generation: Generation | None = None
        self.on_word: Callable[[int], None] = lambda _: None
        self.on_load: Callable[[Callable[[str, float], None]], None] = lambda _: None
        self.closed = False
        self.full = False
        self.says_yes = False
        self.speculator = SimpleNamespace(last_round=None)
        self.cancelled = False
        self.parallel: int | None = None

    def open_engine(self, config: Config, on_progress: Callable[[str, float], None]) -> TalkingEngine:
        self.loaded_with = config.arguments() | {"on_progress": on_progress}
        self.on_load(on_progress)
        self.closed = False
        return self

    def close(self) -> None:
        self.closed = True

    def stream(
        self,
        prompt: Any,
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Chunk]:
        assert not self.closed
        self.asked.append((prompt, config or GenerationConfig(), raw))
        if prompt == "too long":
            raise ContextLengthError("The prompt has 9 tokens.", "Shorten it.")
        self.cancelled = False
        answer = self.last_generation = Generation(prompt_tokens=3, context_full=self.full)
        for word in self.thought:
            answer.tokens.append(7)
            answer.reasoning += word
            answer.reasoning_tokens += 1
            answer.passes.append(PassRecord(4, 0, 0.0, 0.0, 0.0))
            yield Chunk("", (7,), answer.passes[-1], reasoning=word)
        for number, word in enumerate(self.words):
            self.on_word(number)
            if self.cancelled:
                answer.finish_reason = "cancelled"
                break
            answer.tokens.append(number)
            answer.text += word
            answer.passes.append(PassRecord(4, 0, 0.0, 0.0, 0.0))
            yield Chunk(word, (number,), answer.passes[-1])
        yield Chunk("", generation=answer)

    def stream_many(self, source: RequestSource, *, parallel: int | None = None) -> Iterator[Event]:
        """The answers one after the other; `parallel` is noted."""
        self.parallel = parallel
        while True:
            request = source.pop()
            if request is None:
                if source.wait():
                    continue
                return
            try:
                for chunk in self.stream(request.prompt, request.config, raw=request.raw):
                    yield Event(request, chunk)
            except LOST:  # ends all answers
                raise
            except EdgeSpecError as error:
                yield Event(request, error=error)
            if self.cancelled:
                return

    def cancel(self) -> None:
        self.cancelled = True

    def __enter__(self) -> TalkingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TalkingSession:
    """A session whose answers are the engine's."""

    has_images = False

    def __init__(self, engine: TalkingEngine, system: str | None = None) -> None:
        self.engine = engine
        self.system = system
        self.file = None
        self.unsaved = ""
        self.messages: list[dict[str, str]] = []

    def ask(
        self,
        text: str,
        config: GenerationConfig | None = None,
        *,
        images: Sequence[object] = (),
        **more: Any,
    ) -> Iterator[Chunk]:
        assert not images
        yield from self.engine.stream(text, config, **more)
        assert self.engine.last_generation is not None
        if not self.engine.last_generation.passes:
            return
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": self.engine.last_generation.text},
        ]

    def continue_answer(self, config: GenerationConfig | None = None, **more: Any) -> Iterator[Chunk]:
        yield from self.engine.stream("(go on)", config, **more)
        assert self.engine.last_generation is not None
        self.messages[-1]["content"] += self.engine.last_generation.text

    def clear(self) -> None:
        self.messages.clear()

    def attach(self, engine: TalkingEngine) -> None:
        self.engine = engine

    def detach(self) -> None:
        pass

    @property
    def turns(self) -> int:
        return len(self.messages) // 2

    def drop_oldest(self, text: str = "", room: int = 256) -> int:
        dropped = self.turns - 1
        del self.messages[:-2]
        self.engine.full = False
        return dropped

    def undo(self) -> bool:
        had = bool(self.messages)
        del self.messages[-2:]
        return had


def records(text: str) -> list[dict[str, Any]]:
    """Parse JSON Lines: what a batch writes."""
    return [json.loads(line) for line in text.split("\n") if line]


def write_lines(path: Path, *lines: object) -> Path:
    """Write lines of a batch; those that are no text as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path
