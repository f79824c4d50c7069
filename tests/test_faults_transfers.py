"""The rules on what a store does wrong, one or more tests each, on a store in memory that is told to do it."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future

import pytest

from mooncrate import CacheGroup, KVPool, LoadResult, PoolLimits, RankTopology, SaveResult
from mooncrate.data import KeyMetadata, PoolKey
from mooncrate.errors import StoreError
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.pacing import Backoff
from mooncrate.results import FailedChunk, SkipReason
from mooncrate.store_faults import Fault, ManualClock
from toy_engine import ToyEngine, Waiting, prompt, to_load, to_save

FULL = CacheGroup.full_attention(16)
NO_PAUSE = PoolLimits(first_pause_seconds=0.0, max_pause_seconds=0.0)
TWO_CHUNKS_A_CALL = PoolLimits(max_batch_integers=8, first_pause_seconds=0.0, max_pause_seconds=0.0)
"""Of two regions each: an address and a size per region."""


@pytest.fixture
def log() -> list[Call]:
    """What the store was asked."""
    return []


@pytest.fixture
def store(log: list[Call]) -> MemoryStore:
    return MemoryStore(log=log)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([FULL])


@pytest.fixture
def pool(store: MemoryStore, engine: ToyEngine) -> Iterator[KVPool]:
    """A pool whose calls hold two chunks at most, and that does not rest."""
    with open_pool(store, engine, limits=TWO_CHUNKS_A_CALL) as opened:
        yield opened


def open_pool(store: MemoryStore, engine: ToyEngine, **options: object) -> KVPool:
    opened = KVPool.open(model_name="m", groups=engine.groups, store=store, **options)  # type: ignore[arg-type]
    engine.register(opened)
    return opened


def keys_of(hashes: Sequence[bytes], group_id: int = 0, metadata: KeyMetadata | None = None) -> list[str]:
    metadata = metadata or KeyMetadata("m", 0, 0, 0, 0, group_id)
    return [PoolKey(metadata, chunk_hash.hex()).to_string() for chunk_hash in hashes]


def saved(pool: KVPool, engine: ToyEngine, hashes: Sequence[bytes], block_ids: Sequence[int]) -> SaveResult:
    """Computes and saves a prompt of one group."""
    engine.compute(hashes, [block_ids])
    return pool.save(to_save(hashes, [block_ids], len(hashes) * 16)).result()


def loaded(pool: KVPool, hashes: Sequence[bytes], block_ids: Sequence[int], num_cached: int = 0) -> LoadResult:
    return pool.load(to_load(hashes, [block_ids], len(hashes) * 16, num_cached)).result()


# Failures


@pytest.mark.parametrize("answer", [0, 1, 191, 193, 2**31, -600, -704, -707, -800, -900, -12345])
def test_rule_20_a_block_counts_only_if_all_its_bytes_came(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, answer: int
) -> None:
    hashes, block_ids = prompt("rule 20", 7), [11, 12, 13, 14, 15, 16, 17]
    saved(pool, engine, hashes, [1, 2, 3, 4, 5, 6, 7])
    assert engine.row_bytes == 192
    store.faults.add(Fault(call="get", keys={keys_of(hashes)[3]}, code=answer))
    result = loaded(pool, hashes, block_ids)
    assert (result.num_tokens, result.num_bytes) == (48, 3 * 192)
    assert result.failed_block_ids == (frozenset({14, 15, 16, 17}),)  # the failed one, and the calls never made
    assert (result.codes, result.is_complete) == ({answer: 1}, False)
    assert all(engine.is_empty(0, block_id) for block_id in (14, 15, 16, 17))


@pytest.mark.parametrize("length", [0, 1])
def test_rule_20_answers_that_are_too_few_are_failures(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, length: int
) -> None:
    hashes = prompt("rule 20", 5)
    saved(pool, engine, hashes, [1, 2, 3, 4, 5])
    store.faults.add(Fault(call="get", skip=1, truncate=length))
    result = loaded(pool, hashes, [11, 12, 13, 14, 15])
    assert result.num_tokens == 32 + 16 * length
    assert result.failed_block_ids == (frozenset({13, 14, 15} - ({13} if length else set())),)
    assert pool.metrics().counts["fault_keys"] == 2 - length


def test_rule_20_a_store_that_raises_in_the_middle(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes = prompt("rule 20", 6)
    saved(pool, engine, hashes, [1, 2, 3, 4, 5, 6])
    store.faults.add(Fault(call="get", skip=2, error=ConnectionError("gone")))
    result = loaded(pool, hashes, [11, 12, 13, 14, 15, 16])
    assert (result.num_tokens, result.failed_block_ids) == (64, (frozenset({15, 16}),))
    assert isinstance(result.error, ConnectionError)
    assert result.error.__traceback__ is not None


def test_rule_20_a_group_that_fails_takes_the_prefix_of_the_others(store: MemoryStore) -> None:
    groups = [FULL, CacheGroup.full_attention(32), CacheGroup.sliding_window(16, 40)]
    engine = ToyEngine(groups)
    hashes, block_ids = prompt("rule 20", 8), [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]
    with open_pool(store, engine, limits=TWO_CHUNKS_A_CALL) as pool:
        engine.compute(hashes, block_ids)
        pool.save(to_save(hashes, block_ids, 128)).result()
        store.pool.drop(keys_of(hashes[3:4], 1))
        result = pool.load(to_load(hashes, block_ids, 128)).result()
        assert (result.num_tokens, result.codes) == (0, {-704: 1})  # the window of 32 tokens was not loaded
        assert [len(failed) for failed in result.failed_block_ids] == [4, 3, 3]
        result = pool.load(to_load(hashes, block_ids, 128, num_cached_tokens=32)).result()
        assert result.num_tokens == 32


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError(), StoreError("x"), MemoryError(), KeyError("k")])
@pytest.mark.parametrize("call", ["exists", "put"])
def test_rule_21_an_exception_fails_one_save_and_no_other(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, call: str, error: Exception
) -> None:
    first, second = prompt("first", 2), prompt("second", 2)
    store.faults.add(Fault(call=call, error=error))  # type: ignore[arg-type]
    result = saved(pool, engine, first, [1, 2])
    assert result.error is error
    assert [chunk.chunk_id for chunk in result.failed] == [0, 1]
    assert saved(pool, engine, second, [3, 4]).is_complete
    assert saved(pool, engine, first, [1, 2]).is_complete


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), CancelledError(), asyncio.CancelledError()],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_rule_21_whatever_ends_a_thread_elsewhere_ends_one_job_here(
    pool: KVPool, engine: ToyEngine, error: BaseException
) -> None:
    class Ending:
        def synchronize(self) -> None:
            raise error

    hashes = prompt("rule 21", 1)
    engine.compute(hashes, [[1]])
    first = pool.save(to_save(hashes, [[1]], 16), event=Ending())
    waiting = pool.save(to_save(hashes, [[1]], 16))
    failure = first.exception(30)
    assert isinstance(failure, StoreError)  # not the error itself, which would end the thread that asks, too
    assert failure.__cause__ is error
    assert not first.cancelled()
    assert waiting.result(30).num_saved == 1
    loading = pool.load(to_load(hashes, [[2]], 16), event=Ending())
    assert isinstance(loading.exception(30), StoreError)
    assert loaded(pool, hashes, [3]).num_tokens == 16
    counts = pool.metrics().counts
    assert (counts["saves_failed"], counts["loads_failed"]) == (1, 1)


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), CancelledError(), ValueError("mine")])
def test_rule_21_a_callback_that_raises_ends_no_job_and_no_thread(
    pool: KVPool, engine: ToyEngine, error: BaseException
) -> None:
    def fail(_: Future[SaveResult]) -> None:
        raise error

    busy = Waiting()
    jobs = [pool.save(to_save(prompt("busy", 1), [[2]], 16), event=busy)]
    busy.gate.wait_until_reached()
    # More than there are threads.
    jobs += [pool.save(to_save(prompt(f"rule 21 {number}", 1), [[1]], 16)) for number in range(4)]
    for job in jobs:
        job.add_done_callback(fail)
    busy.gate.open()
    assert [job.result(30).num_saved for job in jobs] == [1] * 5
    assert saved(pool, engine, prompt("later", 2), [3, 4]).is_complete


@pytest.mark.parametrize("vanished", range(5))
def test_rule_22_a_key_that_vanished_since_the_lookup_is_a_miss(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, vanished: int
) -> None:
    hashes = prompt("rule 22", 5)
    saved(pool, engine, hashes, [1, 2, 3, 4, 5])
    assert pool.lookup(81, hashes) == 80
    store.pool.drop([keys_of(hashes)[vanished]])
    result = loaded(pool, hashes, [11, 12, 13, 14, 15])
    assert (result.num_tokens, result.codes) == (16 * vanished, {-704: 1})
    assert 11 + vanished in result.failed_block_ids[0]
    assert pool.metrics().counts["missed_keys"] == 1
    assert pool.metrics().counts["fault_keys"] == 0
    assert pool.lookup(81, hashes) == 16 * vanished


@pytest.mark.parametrize(
    ("code", "count"),
    [(-704, "missed_keys"), (-707, "missed_keys"), (-800, "fault_keys"), (-900, "fault_keys"), (-1, "fault_keys")],
)
def test_rule_23_misses_and_faults_are_counted_apart(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, code: int, count: str
) -> None:
    hashes = prompt("rule 23", 2)
    saved(pool, engine, hashes, [1, 2])
    store.faults.add(Fault(call="get", code=code))
    loaded(pool, hashes, [3, 4])
    counts = pool.metrics().counts
    assert {name: counts[name] for name in ("missed_keys", "pressure_keys", "fault_keys")} == {
        "missed_keys": 0,
        "pressure_keys": 0,
        "fault_keys": 0,
        count: 2,
    }


# Saving


def test_rule_24_pressure_pauses_saving_and_the_same_request_goes_on(
    store: MemoryStore, engine: ToyEngine, log: list[Call]
) -> None:
    hashes, clock = prompt("rule 24", 6), ManualClock()
    with open_pool(store, engine, limits=PoolLimits(max_batch_integers=8)) as pool:
        pool._backoff = Backoff(0.1, 5.0, clock, draw=lambda: 1.0)
        store.faults.add(Fault(call="put", indices={1}, skip=1, code=-200))
        result = saved(pool, engine, hashes, [1, 2, 3, 4, 5, 6])
        assert (result.num_saved, result.failed, result.skipped) == (
            3,
            (FailedChunk(0, 3, -200),),
            SkipReason.PRESSURE,
        )
        num_calls = len(log)
        assert saved(pool, engine, hashes, [1, 2, 3, 4, 5, 6]).skipped is SkipReason.PRESSURE
        assert saved(pool, engine, prompt("other", 2), [8, 9]).skipped is SkipReason.PRESSURE
        assert len(log) == num_calls  # the store is left alone
        clock.advance(0.1)
        assert saved(pool, engine, hashes, [1, 2, 3, 4, 5, 6]).is_complete
        assert pool.metrics().counts["pressure_keys"] == 1
        assert pool.metrics().counts["fault_keys"] == 0


def test_rule_24_pauses_double_up_to_the_longest_and_success_shortens_them() -> None:
    clock = ManualClock()
    backoff = Backoff(0.1, 5.0, clock, draw=lambda: 1.0)
    pauses = []
    for _ in range(9):
        backoff.pause()
        backoff.pause()  # of another thread, at the same time
        start = clock()
        while backoff.is_paused():
            clock.advance(0.05)
        pauses.append(round(clock() - start, 2))
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], abs=0.051)
    backoff.succeed()
    assert not backoff.is_paused()
    backoff.pause()
    clock.advance(0.11)
    assert not backoff.is_paused()


def test_rule_24_ranks_do_not_come_back_together() -> None:
    ends = set()
    for _ in range(50):
        clock = ManualClock()
        backoff = Backoff(1.0, 5.0, clock)
        backoff.pause()
        steps = 0
        while backoff.is_paused():
            clock.advance(0.01)
            steps += 1
        assert 50 <= steps <= 101
        ends.add(steps)
    assert len(ends) > 5


@pytest.mark.parametrize("hole", range(6))
def test_rule_25_a_hole_stops_what_follows_and_is_filled_first(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, log: list[Call], hole: int
) -> None:
    hashes, block_ids = prompt("rule 25", 6), [1, 2, 3, 4, 5, 6]
    store.faults.add(Fault(call="put", keys={keys_of(hashes)[hole]}, code=-800))
    result = saved(pool, engine, hashes, block_ids)
    end_of_call = hole // 2 * 2 + 2
    assert (result.failed, result.num_saved) == ((FailedChunk(0, hole, -800),), end_of_call - 1)
    assert pool.lookup(97, hashes) == 16 * hole
    log.clear()
    assert saved(pool, engine, hashes, block_ids).is_complete
    put = [key for call in log if call.name == "put" for key in call.keys]
    assert put == [key for index, key in enumerate(keys_of(hashes)) if index == hole or index >= end_of_call]
    assert pool.lookup(97, hashes) == 96


def test_rule_25_a_hole_of_one_group_does_not_stop_the_other(store: MemoryStore) -> None:
    engine = ToyEngine([FULL, FULL])
    hashes, block_ids = prompt("rule 25", 4), [[1, 2, 3, 4], [5, 6, 7, 8]]
    with open_pool(store, engine, limits=TWO_CHUNKS_A_CALL) as pool:
        engine.compute(hashes, block_ids)
        store.faults.add(Fault(call="put", keys={keys_of(hashes, 1)[1]}, code=-800))
        result = pool.save(to_save(hashes, block_ids, 64)).result()
    assert (result.num_chunks, result.num_saved, result.failed) == (8, 5, (FailedChunk(1, 1, -800),))
    assert sorted(store.pool.keys()) == sorted(keys_of(hashes, 0) + keys_of(hashes, 1)[:1])


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 8, 16])
def test_rule_26_all_ranks_together_save_every_chunk_once(tp_size: int) -> None:
    hashes = prompt("rule 26", 21)
    for replicas in (size for size in range(1, tp_size + 1) if tp_size % size == 0):
        group = CacheGroup.full_attention(16, tp_replicas=replicas)
        log: list[Call] = []
        with MemoryStore(log=log) as store:
            for tp_rank in range(tp_size):
                engine = ToyEngine([group, group], num_blocks=24, block_bytes=8)
                with open_pool(store, engine, topology=RankTopology(tp_rank=tp_rank, tp_size=tp_size)) as pool:
                    ids = list(range(1, 22))
                    pool.save(to_save(hashes, [ids, ids], 21 * 16)).result()
            put = [key for call in log if call.name == "put" for key in call.keys]
            assert len(put) == len(set(put)) == 2 * 21 * tp_size // replicas
