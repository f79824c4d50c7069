"""A pool's numbers on their way through vLLM to Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import prometheus_client
import pytest

from connector_parts import connector_module
from mooncrate.metrics import HELP, Count, Recorder, Timing

pytestmark = pytest.mark.vllm_version("0.32.0")

DEPTHS: Final = {"save": 0, "load": 0, "lookup": 0}
DOCS: Final = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_only_what_was_added_is_sent() -> None:
    source, recorder = connector_module("metrics").StatsSource(), Recorder()
    assert source.take(recorder.snapshot(DEPTHS)) is None
    recorder.add(Count.SAVED_BYTES, 100)
    recorder.observe(Timing.PUT, 0.002)
    recorder.observe(Timing.PUT, 100.0)
    first = source.take(recorder.snapshot(DEPTHS))
    assert first.data["counts"] == {"saved_bytes": 100}
    assert first.data["seconds"]["put"] == pytest.approx(100.002)
    assert sum(first.data["buckets"]["put"]) == 2
    assert source.take(recorder.snapshot(DEPTHS)) is None
    recorder.add(Count.SAVED_BYTES, 7)
    assert source.take(recorder.snapshot(DEPTHS)).data == {"counts": {"saved_bytes": 7}}


def stats(**counts: int) -> Any:  # noqa: ANN401
    recorder = Recorder()
    for name, number in counts.items():
        recorder.add(Count[name.upper()], number)
    recorder.observe(Timing.GET, 0.004)
    return connector_module("metrics").StatsSource().take(recorder.snapshot(DEPTHS))


def test_ranks_are_summed() -> None:
    total = stats(saved_bytes=3).aggregate(stats(saved_bytes=4, loads=1)).aggregate(stats(loads=1))
    assert total.data["counts"] == {"saved_bytes": 7, "loads": 2}
    assert total.data["seconds"]["get"] == pytest.approx(0.012)
    shown = total.reduce()
    assert (shown["saved_bytes"], shown["get_calls"], shown["get_mean_ms"]) == (7, 3, 4.0)


def test_an_empty_start_takes_over_what_comes() -> None:
    module = connector_module("metrics")
    total = module.MooncrateStats()
    assert total.is_empty()
    assert total.aggregate(stats(loads=2)).data["counts"] == {"loads": 2}
    total.reset()
    assert total.is_empty()


def make_exporter(registry: prometheus_client.CollectorRegistry) -> Any:  # noqa: ANN401
    def make(name: str, documentation: str, labelnames: list[str]) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, documentation, labelnames, registry=registry)

    return connector_module("metrics").MooncratePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {prometheus_client.Gauge: None, prometheus_client.Counter: make, prometheus_client.Histogram: None},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


def test_every_count_is_exported_per_engine() -> None:
    registry = prometheus_client.CollectorRegistry()
    exporter = make_exporter(registry)
    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:mooncrate_saved_bytes_total", labels) == 0
    exporter.observe(stats(saved_bytes=5, lookups=2).data, 1)
    exporter.observe(stats(saved_bytes=6).data, 1)
    exporter.observe(None, 1)
    assert registry.get_sample_value("vllm:mooncrate_saved_bytes_total", labels) == 11
    assert registry.get_sample_value("vllm:mooncrate_lookups_total", labels) == 2
    assert registry.get_sample_value("vllm:mooncrate_saved_bytes_total", labels | {"engine": "0"}) == 0
    get = labels | {"step": "get"}
    assert registry.get_sample_value("vllm:mooncrate_step_calls_total", get) == 2
    assert registry.get_sample_value("vllm:mooncrate_step_seconds_total", get) == pytest.approx(0.008)
    buckets = {
        bound: registry.get_sample_value("vllm:mooncrate_step_seconds_bucket_total", get | {"le": bound})
        for bound in ("0.0025", "0.005", "60.0", "+Inf")
    }
    assert buckets == {"0.0025": 0, "0.005": 2, "60.0": 2, "+Inf": 2}


def test_the_operators_page_has_every_metric_and_no_other() -> None:
    registry = prometheus_client.CollectorRegistry()
    make_exporter(registry)
    exported = {f"{metric.name}_total" for metric in registry.collect()}
    described = set(re.findall(r"^\| `(vllm:mooncrate_\w+)`", DOCS.read_text(), re.MULTILINE))
    assert described == exported
    assert len(exported) == len(HELP) + 3
