"""Counts and timings of a pool, kept in fixed arrays, and their export to Prometheus.

Rationale: the data path must never pay for being watched. An operation adds to a few numbers under one lock; no object
is made for it and nothing grows.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from bisect import bisect_left
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from mooncrate.store import ResultClass, classify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

BUCKET_BOUNDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    60.0,
)
"""Upper bounds of histograms in seconds, inclusive; one more bucket has no bound."""


class Count(enum.IntEnum):
    """What is counted. Names end up in the snapshot and, with ``mooncrate_`` and ``_total``, in Prometheus."""

    SAVED_KEYS = 0
    SAVED_BYTES = 1
    PRESENT_KEYS = 2
    LOADED_KEYS = 3
    LOADED_BYTES = 4
    MISSED_KEYS = 5
    PRESSURE_KEYS = 6
    FAULT_KEYS = 7
    NULL_BLOCKS = 8
    SAVES = 9
    SAVES_REFUSED = 10
    SAVES_PAUSED = 11
    SAVES_FAILED = 12
    LOADS = 13
    LOADS_FAILED = 14
    JOBS_CANCELLED = 15
    LOOKUPS = 16
    LOOKUPS_SHARED = 17
    LOOKUPS_FAILED = 18
    LOOKUPS_LATE = 19
    LOOKUP_KEYS = 20
    HIT_TOKENS = 21


HELP: Final[Mapping[Count, str]] = {
    Count.SAVED_KEYS: "Chunks put into the pool.",
    Count.SAVED_BYTES: "Bytes put into the pool, of chunks that were put.",
    Count.PRESENT_KEYS: "Chunks that a save found in the pool.",
    Count.LOADED_KEYS: "Chunks that arrived whole.",
    Count.LOADED_BYTES: "Bytes of chunks that arrived whole.",
    Count.MISSED_KEYS: "Chunks of a load that the pool no longer had.",
    Count.PRESSURE_KEYS: "Chunks that found no room in the pool.",
    Count.FAULT_KEYS: "Chunks that a fault of store, transport or call kept from moving.",
    Count.NULL_BLOCKS: "Chunks left out because they lie in the null block.",
    Count.SAVES: "Saves that ended.",
    Count.SAVES_REFUSED: "Saves refused because the queue was full.",
    Count.SAVES_PAUSED: "Saves that rested, or stopped early, because the pool had no room.",
    Count.SAVES_FAILED: "Saves that ended with an exception.",
    Count.LOADS: "Loads that ended.",
    Count.LOADS_FAILED: "Loads that did not bring every chunk.",
    Count.JOBS_CANCELLED: "Saves and loads that were cancelled before they began.",
    Count.LOOKUPS: "Lookups.",
    Count.LOOKUPS_SHARED: "Lookups that shared the answer to an equal one.",
    Count.LOOKUPS_FAILED: "Lookups that are 0 because the store failed.",
    Count.LOOKUPS_LATE: "Lookups that are 0 because the answer did not come in time.",
    Count.LOOKUP_KEYS: "Keys asked for by lookups.",
    Count.HIT_TOKENS: "Tokens that lookups found.",
}


class Timing(enum.IntEnum):
    """What is timed, in seconds."""

    PLAN = 0
    EXISTS = 1
    PUT = 2
    GET = 3
    LOOKUP = 4


_COUNT_OF_CLASS: Final = {
    ResultClass.MISS: Count.MISSED_KEYS,
    ResultClass.PRESSURE: Count.PRESSURE_KEYS,
    ResultClass.FAULT: Count.FAULT_KEYS,
    ResultClass.OK: Count.FAULT_KEYS,  # of a get that brought another number of bytes
}


@dataclass(frozen=True)
class Histogram:
    """How long something took.

    Attributes:
        bounds: Upper bounds of the buckets in seconds, inclusive; the last bucket has none.
        counts: Observations per bucket, one more than there are bounds; not cumulative.
        sum_seconds: Sum of all.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)


@dataclass(frozen=True)
class PoolMetrics:
    """What a pool has done so far, all of one moment.

    Attributes:
        counts: By the lower-case name of `Count`, like ``saved_bytes``.
        seconds: By the lower-case name of `Timing`, like ``exists``.
        queue_depths: Jobs that wait, by ``save``, ``load`` and ``lookup``.
    """

    counts: Mapping[str, int]
    seconds: Mapping[str, Histogram]
    queue_depths: Mapping[str, int]


class Recorder:
    """Where a pool's counts are kept. Safe to use from many threads; its memory does not grow."""

    def __init__(self) -> None:
        """Begins with zeros."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._counts = [0] * len(Count)
        self._buckets = [[0] * (len(BUCKET_BOUNDS) + 1) for _ in Timing]
        self._sums = [0.0] * len(Timing)

    def add(self, count: Count, number: int = 1) -> None:
        """Adds to a count."""
        with self._lock:
            self._counts[count] += number

    def add_codes(self, codes: Iterable[int]) -> None:
        """Counts the codes of chunks that did not move, by their class."""
        with self._lock:
            for code in codes:
                self._counts[_COUNT_OF_CLASS[classify(code)]] += 1

    def observe(self, timing: Timing, seconds: float) -> None:
        """Adds one observation."""
        with self._lock:
            self._buckets[timing][bisect_left(BUCKET_BOUNDS, seconds)] += 1
            self._sums[timing] += seconds

    @contextmanager
    def timed(self, timing: Timing) -> Iterator[None]:
        """Observes how long a ``with`` takes, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe(timing, time.perf_counter() - start)

    def snapshot(self, queue_depths: Mapping[str, int]) -> PoolMetrics:
        """Returns all numbers as they are now."""
        # Only the thread that forked is in a forked child, and the lock may have been held by another one.
        with self._lock if os.getpid() == self._pid else nullcontext():
            counts, sums = list(self._counts), list(self._sums)
            buckets = [tuple(row) for row in self._buckets]
        return PoolMetrics(
            counts={count.name.lower(): counts[count] for count in Count},
            seconds={timing.name.lower(): Histogram(BUCKET_BOUNDS, buckets[timing], sums[timing]) for timing in Timing},
            queue_depths=dict(queue_depths),
        )


class PoolCollector:
    """Exports a pool's numbers to Prometheus: ``REGISTRY.register(PoolCollector(pool.metrics))``.

    Needs ``prometheus_client``: ``pip install mooncrate[metrics]``. Nothing is copied before Prometheus asks.
    """

    def __init__(self, snapshot: Callable[[], PoolMetrics], labels: Mapping[str, str] | None = None) -> None:
        """Makes a collector.

        Args:
            snapshot: Gives the numbers, like ``pool.metrics``.
            labels: For every sample: what tells this pool from others in the process.
        """
        self._snapshot = snapshot
        self._names = tuple(labels or {})
        self._values = tuple((labels or {}).values())

    def describe(self) -> Iterator[Metric]:
        """Yields the metrics without asking the pool, for registries that check names."""
        return self._metrics(Recorder().snapshot({"save": 0, "load": 0, "lookup": 0}))

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as they are now."""
        return self._metrics(self._snapshot())

    def _metrics(self, metrics: PoolMetrics) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily  # noqa: PLC0415

        for count, text in HELP.items():
            counter = CounterMetricFamily(f"mooncrate_{count.name.lower()}", text, labels=self._names)
            counter.add_metric(self._values, metrics.counts[count.name.lower()])
            yield counter
        seconds = HistogramMetricFamily("mooncrate_seconds", "Seconds that a step took.", labels=(*self._names, "step"))
        for step, histogram in metrics.seconds.items():
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
            seconds.add_metric((*self._values, step), buckets, histogram.sum_seconds)
        yield seconds
        depths = GaugeMetricFamily("mooncrate_queue_depth", "Jobs that wait.", labels=(*self._names, "queue"))
        for name, depth in metrics.queue_depths.items():
            depths.add_metric((*self._values, name), depth)
        yield depths
