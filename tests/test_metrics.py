"""Counts and timings of a pool, and their export."""

import threading
import tracemalloc

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mooncrate import CacheGroup, KVPool
from mooncrate.memory_store import MemoryStore
from mooncrate.metrics import BUCKET_BOUNDS, HELP, Count, PoolCollector, Recorder, Timing
from toy_engine import ToyEngine, prompt, to_load, to_save

NO_QUEUES = {"save": 0, "load": 0, "lookup": 0}
FULL = CacheGroup.full_attention(16)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.0001, 0), (0.00011, 1), (0.005, 5), (60.0, 14), (60.1, 15), (1e9, 15)]
)
def test_an_observation_falls_into_its_bucket(seconds: float, bucket: int) -> None:
    recorder = Recorder()
    recorder.observe(Timing.PUT, seconds)
    histogram = recorder.snapshot(NO_QUEUES).seconds["put"]
    assert [index for index, count in enumerate(histogram.counts) if count] == [bucket]
    assert (histogram.sum_seconds, histogram.count) == (seconds, 1)


def test_threads_lose_no_count() -> None:
    recorder = Recorder()
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(2000):
            recorder.add(Count.SAVED_BYTES, 3)
            recorder.observe(Timing.GET, 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics = recorder.snapshot(NO_QUEUES)
    assert metrics.counts["saved_bytes"] == 24_000
    assert metrics.seconds["get"].count == 8_000


def test_memory_does_not_grow_with_operations() -> None:
    recorder = Recorder()
    recorder.add(Count.SAVED_BYTES, 10**9)
    recorder.observe(Timing.PUT, 1.5)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10_000):
        recorder.add(Count.SAVED_BYTES, 10**9)
        recorder.observe(Timing.PUT, 1.5)
        recorder.add_codes([-704, -200])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2000


def test_a_pool_is_exported_to_prometheus() -> None:
    engine, hashes, registry = ToyEngine([FULL]), prompt("metrics", 3), CollectorRegistry()
    with MemoryStore() as store, KVPool.open(model_name="m", groups=[FULL], store=store) as pool:
        registry.register(PoolCollector(pool.metrics, {"rank": "0"}))
        engine.register(pool)
        pool.save(to_save(hashes, [[1, 2, 3]], 48)).result()
        pool.lookup(49, hashes)
        pool.load(to_load(hashes, [[4, 5, 6]], 48)).result()
        text = generate_latest(registry).decode()
    lines = set(text.splitlines())
    assert 'mooncrate_saved_bytes_total{rank="0"} 576.0' in lines
    assert 'mooncrate_loaded_keys_total{rank="0"} 3.0' in lines
    assert 'mooncrate_hit_tokens_total{rank="0"} 48.0' in lines
    assert 'mooncrate_queue_depth{queue="save",rank="0"} 0.0' in lines
    for step in ("plan", "exists", "put", "get", "lookup"):
        assert f'mooncrate_seconds_count{{rank="0",step="{step}"}} {2 if step in ("plan", "exists") else 1}.0' in lines
        assert f'mooncrate_seconds_bucket{{le="+Inf",rank="0",step="{step}"}}' in text


def test_every_count_has_a_help_text_and_buckets_ascend() -> None:
    assert set(HELP) == set(Count)
    assert list(BUCKET_BOUNDS) == sorted(set(BUCKET_BOUNDS))


def test_rule_35_metrics_never_raise_also_after_close() -> None:
    registry = CollectorRegistry()
    with MemoryStore() as store:
        pool = KVPool.open(model_name="m", groups=[FULL], store=store)
        registry.register(PoolCollector(pool.metrics))
        pool.close()
        assert pool.metrics().counts["lookups"] == 0
    assert b"mooncrate_lookups_total 0.0" in generate_latest(registry)
