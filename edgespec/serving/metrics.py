"""Figures for monitoring, in the text format of Prometheus.

Totals only grow, so that a monitor can take rates over any time. What people look at by hand is given for the
last minute as well.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

OUTCOMES = ("answered", "refused", "turned_away", "failed", "abandoned")
"""What becomes of a request: see `docs/how-to/serve.md`."""

_WINDOW_S = 60
_LATENCIES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class TrafficSums:
    """Sums over some seconds."""

    passes: int = 0
    sequences: int = 0  # answers extended, summed over the passes
    tokens: int = 0  # of answers
    disk_bytes: int = 0  # of weights read from disk

    def add(self, other: TrafficSums) -> None:
        """Add what happened in other seconds."""
        self.passes += other.passes
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.disk_bytes += other.disk_bytes


class LastMinute:
    """Sums over the last minute, kept by the second.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self._seconds: deque[tuple[int, TrafficSums]] = deque()

    def add(self, sums: TrafficSums) -> None:
        """Add what has just happened."""
        second = int(self._now())
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget(second)
            self._seconds.append((second, TrafficSums()))
        self._seconds[-1][1].add(sums)

    @property
    def sums(self) -> TrafficSums:
        self._forget(int(self._now()))
        total = TrafficSums()
        for _, sums in self._seconds:
            total.add(sums)
        return total

    @property
    def length_s(self) -> float:
        """Seconds that the sums cover: a minute, or less just after the start."""
        return min(max(self._now() - self._start, 1.0), _WINDOW_S)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _WINDOW_S:
            self._seconds.popleft()


class Metrics:
    """Counts what a server does; may be used by several threads.

    Args:
        queue_length: answers that wait to begin.
        in_flight: answers that have begun.
        is_up: whether the model can answer.
        now: a clock, in seconds.

    Attributes:
        registry: what the page shows.
    """

    def __init__(
        self,
        queue_length: Callable[[], float],
        in_flight: Callable[[], float],
        is_up: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._recent = LastMinute(now)
        self._disk_bytes = 0

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"edgespec_{name}", text, registry=registry).set_function(value)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"edgespec_{name}", text, registry=registry)

        gauge("up", "Whether the model can answer.", is_up)
        gauge("queue_length", "Answers that wait to begin.", queue_length)
        gauge("sequences_in_flight", "Answers that have begun and not ended.", in_flight)
        self._requests = Counter(
            "edgespec_requests", "Requests for completions, by outcome.", ["outcome"], registry=registry
        )
        for outcome in OUTCOMES:  # so that all of them are shown from the start
            self._requests.labels(outcome)
        self._prompt_tokens = counter("prompt_tokens", "Tokens in the prompts of accepted requests.")
        self._cached_tokens = counter(
            "cached_prompt_tokens", "Tokens of prompts that were not read, because their state was known."
        )
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._passes = counter("passes", "Passes of the model that extended answers.")
        self._sequences = counter("pass_sequences", "Answers extended by a pass, summed over the passes.")
        self._pass_s = counter("pass_seconds", "Seconds that those passes took, drafting included.")
        self._first_token = Histogram(
            "edgespec_first_token_seconds",
            "Seconds from a request's arrival in the queue to the first token of each answer.",
            buckets=_LATENCIES_S,
            registry=registry,
        )
        registry.register(_RecentFigures(self))
        ProcessCollector(registry=registry)

    def request_ended(self, outcome: str) -> None:
        """Count a request; `outcome` is one of OUTCOMES."""
        self._requests.labels(outcome).inc()

    def prompt_accepted(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def prompt_cached(self, tokens: int) -> None:
        """Count tokens of a prompt that were not read."""
        self._cached_tokens.inc(tokens)

    def pass_done(self, sequences: int, seconds: float, disk_bytes: int) -> None:
        """Count a pass.

        Args:
            sequences: answers that it extended.
            disk_bytes: read from disk since the pass before.
        """
        self._passes.inc()
        self._sequences.inc(sequences)
        self._pass_s.inc(seconds)
        self._add(TrafficSums(passes=1, sequences=sequences, disk_bytes=disk_bytes))

    def tokens_generated(self, tokens: int) -> None:
        """Count tokens of an answer."""
        self._tokens.inc(tokens)
        self._add(TrafficSums(tokens=tokens))

    def first_token(self, seconds: float) -> None:
        """Count an answer whose first token has come after so many seconds."""
        self._first_token.observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """The page, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def recent(self) -> tuple[TrafficSums, float, int]:
        """Sums over the last minute, the seconds that they cover, and all bytes ever read from disk."""
        with self._lock:
            return self._recent.sums, self._recent.length_s, self._disk_bytes

    def _add(self, sums: TrafficSums) -> None:
        with self._lock:
            self._recent.add(sums)
            self._disk_bytes += sums.disk_bytes


class _RecentFigures(Collector):
    """The figures of the last minute, worked out when they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        sums, seconds, disk_bytes = self._metrics.recent()
        yield CounterMetricFamily("edgespec_disk_read_bytes", "Bytes of weights read from disk.", disk_bytes)
        for name, text, value in (
            ("tokens_per_second", "Tokens generated per second", sums.tokens / seconds),
            ("tokens_per_pass", "Tokens that a pass yielded", _ratio(sums.tokens, sums.passes)),
            ("sequences_per_pass", "Answers that a pass extended", _ratio(sums.sequences, sums.passes)),
            ("disk_read_bytes_per_second", "Bytes of weights read per second", sums.disk_bytes / seconds),
        ):
            yield GaugeMetricFamily(f"edgespec_{name}", f"{text}, over the last minute.", value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
