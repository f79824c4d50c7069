"""A pool's numbers on their way to vLLM's log and to Prometheus, as ``vllm:mooncrate_*``.

vLLM collects from every process what was added since it last asked, sums over ranks, and counts on. Latencies are
sums and numbers of calls, and calls per upper bound: a histogram of Prometheus takes single observations, of which a
busy pool has too many to send.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from mooncrate.metrics import BUCKET_BOUNDS, HELP, Timing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mooncrate.metrics import PoolMetrics

BOUNDS: Final = (*map(str, BUCKET_BOUNDS), "+Inf")
PREFIX: Final = "vllm:mooncrate_"


class MooncrateStats(KVConnectorStats):
    """What was added to a pool's numbers: ``counts`` by name, and by step ``seconds`` and ``buckets``."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Takes numbers over, or begins with none."""
        super().__init__(data=data or {})

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Tells whether nothing was added."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> MooncrateStats:
        """Adds what another rank, or a later step, has."""
        for kind in ("counts", "seconds"):
            mine = self.data.setdefault(kind, {}) if kind in other.data else {}
            for name, number in other.data.get(kind, {}).items():
                mine[name] = mine.get(name, 0) + number
        for step, buckets in other.data.get("buckets", {}).items():
            mine = self.data.setdefault("buckets", {})
            mine[step] = [a + b for a, b in zip(mine.get(step, [0] * len(buckets)), buckets, strict=True)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns what the log shows: counts, and mean milliseconds of each step."""
        shown: dict[str, int | float] = dict(self.data.get("counts", {}))
        for step, buckets in self.data.get("buckets", {}).items():
            shown[f"{step}_calls"] = sum(buckets)
            shown[f"{step}_mean_ms"] = round(1e3 * self.data["seconds"][step] / sum(buckets), 3)
        return shown


class StatsSource:
    """Cuts the numbers of a pool, which only grow, into what was added each time."""

    def __init__(self) -> None:
        """Begins at 0."""
        self._before: PoolMetrics | None = None

    def take(self, now: PoolMetrics) -> MooncrateStats | None:
        """Returns what was added since the last call; None if nothing was."""
        before, self._before = self._before, now
        data: dict[str, Any] = {"counts": {}, "seconds": {}, "buckets": {}}
        for name, number in now.counts.items():
            if added := number - (before.counts[name] if before else 0):
                data["counts"][name] = added
        for step, histogram in now.seconds.items():
            old = before.seconds[step] if before else None
            buckets = [
                count - (old.counts[index] if old is not None else 0) for index, count in enumerate(histogram.counts)
            ]
            if any(buckets):
                data["buckets"][step] = buckets
                data["seconds"][step] = histogram.sum_seconds - (old.sum_seconds if old is not None else 0.0)
        data = {kind: values for kind, values in data.items() if values}
        return MooncrateStats(data) if data else None


class MooncratePromMetrics(KVConnectorPromMetrics):
    """The counters."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Registers them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counts = {
            count.name.lower(): make(f"{PREFIX}{count.name.lower()}", documentation=text, labelnames=labelnames)
            for count, text in HELP.items()
        }
        step_names = [*labelnames, "step"]
        self._seconds = make(
            f"{PREFIX}step_seconds", documentation="Seconds that steps of the data path took.", labelnames=step_names
        )
        self._calls = make(f"{PREFIX}step_calls", documentation="Steps of the data path.", labelnames=step_names)
        self._buckets = make(
            f"{PREFIX}step_seconds_bucket",
            documentation="Steps of the data path that took no longer than `le` seconds.",
            labelnames=[*step_names, "le"],
        )
        for values in per_engine_labelvalues.values():  # so that they are 0 from the start, and not absent
            for counter in self._counts.values():
                counter.labels(*values)
            for timing in Timing:
                self._seconds.labels(*values, timing.name.lower())
                self._calls.labels(*values, timing.name.lower())

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        """Adds what `MooncrateStats` collected."""
        data, values = transfer_stats_data or {}, self.per_engine_labelvalues[engine_idx]
        for name, number in data.get("counts", {}).items():
            self._counts[name].labels(*values).inc(number)
        for step, seconds in data.get("seconds", {}).items():
            self._seconds.labels(*values, step).inc(max(0.0, seconds))
        for step, buckets in data.get("buckets", {}).items():
            self._calls.labels(*values, step).inc(sum(buckets))
            for bound, number in zip(BOUNDS, accumulate(buckets), strict=True):
                self._buckets.labels(*values, step, bound).inc(number)
