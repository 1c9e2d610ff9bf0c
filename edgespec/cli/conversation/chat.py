"""One turn of a chat: a question in, the answer shown as it comes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgespec.cli.conversation import settings
from edgespec.cli.conversation.echo import without_echo
from edgespec.cli.conversation.thoughts import ThoughtDisplay
from edgespec.cli.interrupt import Interruption, cancelling
from edgespec.cli.options.sampling import exact_contradicts
from edgespec.cli.screen.formatting import count
from edgespec.cli.screen.markdown import MarkdownWriter, last_block
from edgespec.cli.screen.results import ResultStream
from edgespec.cli.screen.terminal import Terminal, is_terminal, shows_colour
from edgespec.generation.config import GenerationConfig
from edgespec.generation.result import Chunk, Generation

if TYPE_CHECKING:
    from edgespec.cli.options.sampling import ChosenSampling
    from edgespec.cli.screen.status import StatusLine
    from edgespec.engine.engine import Engine
    from edgespec.engine.sessions.session import ResumedSession, Session
    from edgespec.images.parts import Image

_LONG = 500  # characters of an earlier question that are shown; attached files stand before it
_SET = "/set"  # where a setting comes from that was changed in the chat


class Chat:
    """Asks, shows the answers as they come, and reports their figures.

    Attributes:
        config: how answers are generated.
        at_start: how they were at first.
        sources: where settings that are not the library's defaults come from, by name.
        budget: the tree budget; None means auto.
        exact: exact decoding was requested.
        last_answer: the latest answer; None before the first one, and once it has left the conversation.
        sampled: how its tokens were chosen, in words.
        thoughts: shows what the model thinks.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        config: GenerationConfig,
        terminal: Terminal,
        results: ResultStream,
        *,
        sources: Mapping[str, str] | None = None,
        budget: int | None = None,
        exact: bool = False,
    ) -> None:
        self.session = session
        self.config = self.at_start = config
        self.sources = dict(sources or {})
        self._sources_at_start = dict(self.sources)
        self.terminal = terminal
        self.results = results
        self.budget = budget
        self.exact = exact
        self.last_answer: Generation | None = None
        self.sampled = ""
        self.thoughts = ThoughtDisplay(terminal, " /think shows it.")
        self._engine = engine
        self._warned_unsaved = False
        self._writer = MarkdownWriter(results, _window) if shows_colour(sys.stdout) else None

    @property
    def context(self) -> int:
        """Tokens that the context holds."""
        return self._engine.context

    @property
    def description(self) -> str:
        """Target, drafter and mode in one line."""
        return self._engine.description

    @property
    def model_name(self) -> str:
        from edgespec.models.hub.external import display_name

        return display_name(self._engine.target.model.path)

    def ask(
        self, text: str, images: Sequence[Image] = (), *, as_json: bool = False, continue_hint: str
    ) -> Interruption:
        """Do one turn; returns whether a signal cut it short.

        Args:
            images: those that the question is about.
            continue_hint: what to do after an answer that --max-tokens cut off.

        Raises:
            EdgeSpecError: there is no answer; the conversation is as it was.
        """
        if self.session.has_images and not self._engine.sees_images:
            self.terminal.warn(f"{self.model_name} cannot see the images of this conversation.")
        interruption, answer = self._show(
            lambda status: self.session.ask(text, self.config, images=images, on_prefill=status.prefill),
            as_json=as_json,
            doing="Reading the image" if images else "Reading the prompt",
        )
        if as_json:
            self.results.record(answer.to_json(text))
        self._report(answer, continue_hint)
        return interruption

    def continue_answer(self, *, continue_hint: str) -> Interruption:
        """Continue the last answer; returns as `ask` does."""
        # The paragraph or block of code that is continued is shown again, so that it continues as one.
        begun = last_block(self.session.messages[-1]["content"]) if self._writer is not None else ""
        interruption, answer = self._show(
            lambda status: self.session.continue_answer(self.config, on_prefill=status.prefill), begun
        )
        if answer.passes and not answer.text.strip() and not interruption:
            self.terminal.note("The answer was already complete.")
            return interruption
        self._report(answer, continue_hint)
        return interruption

    def _show(
        self,
        begin: Callable[[StatusLine], Iterator[Chunk]],
        before: str = "",
        *,
        as_json: bool = False,
        doing: str = "Reading the prompt",
    ) -> tuple[Interruption, Generation]:
        """Show `before` and then an answer as it comes; a signal ends it early.

        Args:
            doing: what is waited for at first.
        """
        answer = None
        show = self.results.verbatim if self._writer is None else self._writer.text
        try:
            with without_echo(), cancelling(self._engine) as interruption, self.terminal.status() as status:
                status.waiting(doing)
                for chunk in interruption.reach(begin(status), self._engine):
                    answer = chunk.generation
                    if as_json:
                        status.clear()
                        continue
                    self.thoughts.feed(chunk, status)
                    if chunk.text or answer is not None:
                        status.clear()
                        self.thoughts.end()
                        show(before + chunk.text)
                        before = ""
        finally:
            self._end_answer()
        assert answer is not None, "the last chunk carries the answer"
        self.last_answer = answer
        self.sampled = settings.sampling_in_words(self.config, self.sources)
        return interruption, answer

    def _end_answer(self) -> None:
        if self._writer is not None:
            self._writer.end()
        self.results.end_line()

    def show_last_turn(self) -> None:
        """Show the last question and answer again, on a terminal."""
        if not is_terminal(sys.stdout) or not self.session.messages:
            return
        question, answer = (message["content"] for message in self.session.messages[-2:])
        self.terminal.note(f">>> {question if len(question) <= _LONG else '…' + question[-_LONG:]}")
        (self.results.verbatim if self._writer is None else self._writer.text)(answer)
        self._end_answer()

    def _report(self, answer: Generation, continue_hint: str) -> None:
        if answer.finish_reason != "cancelled":
            self.terminal.only_thought(answer)
        if answer.passes:
            self.terminal.statistics(answer, continue_hint)
        unsaved = self.session.unsaved
        if unsaved and not self._warned_unsaved:
            self.terminal.warn(f"{unsaved}. Resuming will process the conversation again.")
        elif self._warned_unsaved and not unsaved:
            self.terminal.note("What was read of the conversation is saved again.")
        self._warned_unsaved = bool(unsaved)

    def undo(self) -> bool:
        """Remove the last turn; False if there is none."""
        self.last_answer = None
        return self.session.undo()

    def use(self, engine: Engine, chosen: ChosenSampling) -> None:
        """Switch to another model; settings that were changed in the chat stay as they are."""
        changed = {name: getattr(self.config, name) for name, by in self.sources.items() if by == _SET}
        self._engine = engine
        self.session.attach(engine)
        self.at_start, self._sources_at_start = chosen.config, dict(chosen.sources)
        self.config = chosen.config.with_(**changed)
        self.sources = self._sources_at_start | dict.fromkeys(changed, _SET)
        if self.budget is not None:
            self._engine.set_tree_budget(self.budget)

    def change(self, name: str, value: str) -> None:
        config = settings.changed(self.config, name, value, self.at_start)
        if self.exact and not config.rule.kind.invariant:
            raise exact_contradicts(config.verify)
        self.config = config
        name = settings.name_of(name)
        if value.lower() == settings.AS_AT_START and name in self._sources_at_start:
            self.sources[name] = self._sources_at_start[name]
        else:
            self.sources[name] = _SET
        self.terminal.rule(config.rule)

    @property
    def think_has_no_effect(self) -> bool:
        """True if thinking is configured and the model cannot think."""
        return self.config.think != "auto" and not self._engine.can_think

    def set_budget(self, budget: int | None) -> None:
        """Set the tree budget; raises UsageError if the engine cannot."""
        self._engine.set_tree_budget(budget)
        self.budget = budget

    def report_resumed(self, resumed: ResumedSession | None, *, hint: str = "/retry asks it again.") -> None:
        """Say how a saved conversation was resumed.

        Args:
            hint: what to do about a question that was not answered.
        """
        if resumed is None:
            return
        if resumed.turns:
            if resumed.reason:
                how = f". {resumed.reason}, so the next question processes it again"
            else:
                how = f"; {resumed.restored} of {resumed.tokens} tokens restored"
            self.terminal.note(f"Resumed {count(resumed.turns, 'turn')}{how}.")
        if resumed.pending:
            question = " ".join(resumed.pending.split())
            short = question if len(question) <= 60 else question[:59] + "…"
            self.terminal.note(f"The last question was not answered: {short} {hint}")

    def draw_last_tree(self, columns: int) -> bool:
        """Draw the latest tree of the last answer; False if nothing was drafted in it."""
        if self._engine.speculator.last_round is None:
            return False
        from edgespec.cli.screen.tree_drawing import draw_tree

        tree, accepted = self._engine.speculator.last_round
        vocabulary = self._engine.target.model.vocabulary
        lines = draw_tree(tree, accepted, lambda token: vocabulary.piece(token, control=True), columns)
        for line in lines:
            self.terminal.show(line)
        return True


def _window() -> os.terminal_size:
    """Return the size of the terminal; serial consoles and some containers do not know theirs."""
    with suppress(OSError, ValueError):
        # The current size; the variables COLUMNS and LINES do not follow a window that is resized.
        size = os.get_terminal_size(sys.stdout.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()
