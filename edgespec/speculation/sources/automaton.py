"""A suffix automaton: every substring of a sequence, with how often it occurs and what follows it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_ROOT = 0
_MAX_COUNTED = 64  # states that a token's occurrences are counted in


class SuffixAutomaton:
    """The substrings of a sequence that grows token by token (Blumer et al. 1985).

    It may hold several strings: no substring reaches from one into another.

    A state stands for the substrings that end at the same places. Its longest one has `length` tokens; `link`
    leads to the state of the longest suffix that also ends elsewhere. There are at most two states a token,
    and a token takes constant time on average.

    Most states have a single transition, which is kept in two arrays; the others have dictionaries. A token
    of English text takes about 130 bytes in all.
    """

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._count = array("i", [0])
        self._token = array("i", [-1])  # of a state's first transition
        self._target = array("i", [-1])
        self._further: dict[int, dict[int, int]] = {}  # state -> its other transitions
        self._last = _ROOT

    def __len__(self) -> int:
        """Tokens of the string that is being extended."""
        return self._length[self._last]

    @property
    def last(self) -> int:
        """The state of the whole string that is being extended."""
        return self._last

    @property
    def states(self) -> int:
        return len(self._length)

    def extend(self, token: int) -> None:
        """Append a token to the sequence.

        Raises:
            OverflowError: it is no token id.
        """
        new = self._new_state(self._length[self._last] + 1, token=-1, target=-1, count=0)
        state = self._last
        while state >= 0 and self._go(state, token) < 0:
            self._connect(state, token, new)
            state = self._link[state]
        if state < 0:
            self._link[new] = _ROOT
        else:
            below = self._go(state, token)
            self._link[new] = (
                below if self._length[below] == self._length[state] + 1 else self._split(state, token)
            )
        self._last = new
        # Every suffix of the sequence occurs once more. Where there are many states of them, the sequence
        # repeats itself, and the counts of the shortest do not matter: proposals begin with the longest.
        state = new
        for _ in range(_MAX_COUNTED):
            if state <= _ROOT:
                break
            self._count[state] += 1
            state = self._link[state]

    def resume(self, last: int | None = None) -> None:
        """Extend another string from now on: a new one, or the one whose last state this was."""
        self._last = _ROOT if last is None else last

    def end(self) -> tuple[int, int]:
        """The state of the longest suffix of the sequence that also occurs earlier, and its length."""
        state = max(self._link[self._last], _ROOT)
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state of the longest suffix of a string and the next token that occurs in the sequence, and its
        length.

        Args:
            state, length: of the longest suffix of the string that occurs.
        """
        while (below := self._go(state, token)) < 0:
            if state == _ROOT:
                return _ROOT, 0
            state = self._link[state]
            length = self._length[state]
        return below, length + 1

    def suffixes(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """States and lengths of the suffixes of a string that differ in where they occur, the longest first.

        The empty one is not among them.
        """
        while state > _ROOT:
            yield state, length
            state = self._link[state]
            length = self._length[state]

    def continuations(self, state: int) -> dict[int, int]:
        """The tokens that follow a state's substrings, with how often each does.

        Counts are exact as long as no suffix of the sequence has more than 64 states above it.
        """
        if self._token[state] < 0:
            return {}
        found = {self._token[state]: self._count[self._target[state]]}
        for token, target in self._further.get(state, {}).items():
            found[token] = self._count[target]
        return found

    def _go(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        further = self._further.get(state)
        return -1 if further is None else further.get(token, -1)

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
        else:
            self._further.setdefault(state, {})[token] = target

    def _split(self, state: int, token: int) -> int:
        """A state of its own for what now ends at one more place than the rest of its state."""
        whole = self._go(state, token)
        part = self._new_state(
            self._length[state] + 1, self._token[whole], self._target[whole], self._count[whole]
        )
        if whole in self._further:
            self._further[part] = dict(self._further[whole])
        self._link[part], self._link[whole] = self._link[whole], part
        while state >= 0 and self._go(state, token) == whole:
            self._connect(state, token, part)
            state = self._link[state]
        return part

    def _new_state(self, length: int, token: int, target: int, count: int) -> int:
        self._length.append(length)
        self._link.append(-1)
        self._count.append(count)
        self._token.append(token)
        self._target.append(target)
        return len(self._length) - 1
