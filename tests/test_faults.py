"""The rules of the pool, one or more tests each, on a store in memory that is told what to do wrong."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial

import pytest

from mooncrate import CacheGroup, KVPool, LoadResult, Namespace, PoolLimits, RankTopology, SaveResult
from mooncrate.data import KeyMetadata, PoolKey, ReqMeta, RequestTracker
from mooncrate.errors import LayoutError, StoreError
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.pacing import Backoff
from mooncrate.results import FailedChunk, SkipReason
from mooncrate.store_faults import Fault, Gate, ManualClock
from toy_engine import ToyEngine, prompt, to_load, to_save

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


# Keys


def test_rule_1_without_a_namespace_keys_are_those_of_the_reference(
    pool: KVPool, engine: ToyEngine, store: MemoryStore
) -> None:
    hashes = prompt("rule 1", 3)
    assert saved(pool, engine, hashes, [3, 1, 2]).num_saved == 3
    assert sorted(store.pool.keys()) == sorted(f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{one.hex()}" for one in hashes)


def test_rule_2_the_plain_key_confuses_block_sizes_and_a_namespace_does_not(store: MemoryStore) -> None:
    hashes = prompt("rule 2", 4)
    for namespace, num_tokens in ((None, 64), (Namespace(), 0)):
        small = ToyEngine([FULL], hash_block_size=16)
        with open_pool(store, small, namespace=namespace) as pool:
            assert saved(pool, small, hashes, [1, 2, 3, 4]).num_saved == 4
        large = ToyEngine([CacheGroup.full_attention(32)], hash_block_size=16)
        with open_pool(store, large, namespace=namespace, hash_block_size=16) as pool:
            assert pool.lookup(65, hashes) == num_tokens


def test_rule_2_without_a_namespace_the_pool_says_once_what_identifies_keys(
    store: MemoryStore, engine: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "mooncrate"), open_pool(store, engine) as pool:
        saved(pool, engine, prompt("rule 2", 2), [1, 2])
    (record,) = [record for record in caplog.records if "keys are identified by" in record.message]
    assert "model name 'm'" in record.message
    assert "KV dtype" in record.message


@pytest.mark.parametrize("missing", range(4))
def test_rule_4_a_chunk_counts_only_with_all_namespaces(store: MemoryStore, missing: int) -> None:
    hashes = prompt("rule 4", 4)
    ranks = [(tp, pp) for tp in range(2) for pp in range(2)]
    for index, (tp_rank, pp_rank) in enumerate(ranks):
        engine = ToyEngine([FULL])
        topology = RankTopology(tp_rank=tp_rank, tp_size=2, pp_rank=pp_rank, pp_size=2)
        with open_pool(store, engine, topology=topology) as pool:
            assert pool.lookup(65, hashes) == 0
            if index != missing:
                saved(pool, engine, hashes, [1, 2, 3, 4])
    with open_pool(store, engine, topology=RankTopology(tp_size=2, pp_size=2)) as pool:
        assert pool.lookup(65, hashes) == 0


def test_rule_4_replicas_save_the_shard_they_own_together(store: MemoryStore) -> None:
    group = CacheGroup.full_attention(16, tp_replicas=2)
    hashes, hits = prompt("rule 4", 5), []
    for tp_rank in range(4):
        engine = ToyEngine([group])
        with open_pool(store, engine, topology=RankTopology(tp_rank=tp_rank, tp_size=4)) as pool:
            saved(pool, engine, hashes, [1, 2, 3, 4, 5])
            hits.append(pool.lookup(81, hashes))
    assert hits == [0, 0, 16, 80]  # the third rank brings chunk 0 of the second shard, the fourth brings chunk 1
    assert len(store.pool.keys()) == 2 * 5


# Addresses


@pytest.mark.parametrize("block_id", [32, 33, 2**40, -1])
def test_rule_8_a_block_id_outside_the_registered_ones_fails_before_any_transfer(
    pool: KVPool, engine: ToyEngine, log: list[Call], block_id: int
) -> None:
    hashes = prompt("rule 8", 3)
    saved(pool, engine, hashes, [1, 2, 3])
    num_calls = len(log)
    for job in (
        pool.save(to_save(hashes, [[1, 2, block_id]], 48)),
        pool.load(to_load(hashes, [[1, block_id, 3]], 48)),
    ):
        with pytest.raises(LayoutError, match=str(block_id)):
            job.result()
    assert len(log) == num_calls


def test_rule_8_null_blocks_are_skipped_and_counted(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes = prompt("rule 8", 4)
    result = saved(pool, engine, hashes, [0, 0, 5, 6])
    assert (result.num_chunks, result.num_saved, result.num_null_blocks) == (2, 2, 2)
    assert sorted(store.pool.keys()) == sorted(keys_of(hashes)[2:])
    assert pool.metrics().counts["null_blocks"] == 2


def test_rule_10_a_failed_registration_leaves_nothing_registered(
    store: MemoryStore, log: list[Call], engine: ToyEngine
) -> None:
    store.faults.add(Fault(call="register", skip=1, code=-600))
    with pytest.raises(StoreError, match="-600"):
        open_pool(store, engine)
    names = [call.name for call in log]
    assert names == ["register", "register", "unregister"]


# Boundaries


@pytest.mark.parametrize(
    ("num_tokens", "hit"),
    [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (64, 48), (65, 64), (200, 64)],
)
def test_rule_12_a_full_hit_ends_below_the_last_token(
    pool: KVPool, engine: ToyEngine, num_tokens: int, hit: int
) -> None:
    hashes = prompt("rule 12", 4)
    saved(pool, engine, hashes, [1, 2, 3, 4])
    assert pool.lookup(num_tokens, hashes) == hit


@pytest.mark.parametrize("num_cached", [0, 15, 16, 17, 32, 47, 48, 64, 100])
def test_rule_13_only_what_the_engine_lacks_is_loaded(pool: KVPool, engine: ToyEngine, num_cached: int) -> None:
    hashes = prompt("rule 13", 3)
    saved(pool, engine, hashes, [1, 2, 3])
    engine.wipe()
    result = loaded(pool, hashes, [7, 8, 9], num_cached)
    num_local = num_cached // 16
    assert (result.num_tokens, result.num_bytes) == (max(48, num_cached), max(0, 3 - num_local) * engine.row_bytes)
    for chunk_id in range(3):
        assert engine.holds(hashes, [[7, 8, 9]], 0, chunk_id) == (chunk_id >= num_local)
        assert engine.is_empty(0, 7 + chunk_id) == (chunk_id < num_local)


@pytest.mark.parametrize("num_tokens", [1, 15, 17, 47])
def test_rule_14_a_length_that_is_not_hash_aligned_is_a_typed_error(pool: KVPool, num_tokens: int) -> None:
    with pytest.raises(LayoutError, match=str(num_tokens)):
        pool.load(to_load(prompt("rule 14", 3), [[1, 2, 3]], num_tokens))


def test_rule_15_each_group_loads_what_its_kind_needs(store: MemoryStore) -> None:
    groups = [FULL, CacheGroup.sliding_window(16, 33), CacheGroup.recurrent(32)]
    engine = ToyEngine(groups)
    hashes = prompt("rule 15", 8)
    block_ids = [[1, 2, 3, 4, 5, 6, 7, 8]] * 2 + [[1, 2, 3, 4]]
    with open_pool(store, engine) as pool:
        engine.compute(hashes, block_ids)
        assert pool.save(to_save(hashes, block_ids, 128)).result().num_saved == 20
        assert pool.lookup(129, hashes) == 128
        store.pool.drop(keys_of(hashes[5:7], 1))  # in the windows of 96 and of 128 tokens
        assert pool.lookup(129, hashes) == 64
        engine.wipe()
        result = pool.load(to_load(hashes, block_ids, 64)).result()
        assert (result.num_tokens, result.is_complete) == (64, True)
    assert [chunk for chunk in range(8) if engine.holds(hashes, block_ids, 0, chunk)] == [0, 1, 2, 3]
    assert [chunk for chunk in range(8) if engine.holds(hashes, block_ids, 1, chunk)] == [2, 3]
    assert [chunk for chunk in range(4) if engine.holds(hashes, block_ids, 2, chunk)] == [1]


# Block lifetime


class Waiting:
    """A device event that is reached, and then waits to be let go."""

    def __init__(self) -> None:
        self.gate = Gate()

    def synchronize(self) -> None:
        self.gate.hold()


def test_rule_16_a_save_that_was_withdrawn_never_reads_reused_blocks(
    pool: KVPool, engine: ToyEngine, store: MemoryStore
) -> None:
    other, preempted, new = prompt("other", 1), prompt("preempted", 3), prompt("new", 3)
    busy = Waiting()
    running = pool.save(to_save(other, [[9]], 16), event=busy)
    busy.gate.wait_until_reached()
    engine.compute(preempted, [[1, 2, 3]])
    queued = pool.save(to_save(preempted, [[1, 2, 3]], 48))
    assert queued.cancel()
    engine.compute(new, [[1, 2, 3]])
    saving = pool.save(to_save(new, [[1, 2, 3]], 48))
    busy.gate.open()
    assert running.result().num_saved == 1
    assert saving.result().num_saved == 3
    assert sorted(store.pool.keys()) == sorted(keys_of(other) + keys_of(new))
    assert [store.pool.read(key) for key in keys_of(new)] == [engine.object_bytes(one) for one in new]
    with pytest.raises(CancelledError):
        queued.result()


def test_rule_16_a_save_that_runs_cannot_be_withdrawn(pool: KVPool, engine: ToyEngine) -> None:
    hashes, event = prompt("rule 16", 2), Waiting()
    engine.compute(hashes, [[1, 2]])
    job = pool.save(to_save(hashes, [[1, 2]], 32), event=event)
    event.gate.wait_until_reached()
    assert not job.cancel()
    event.gate.open()
    assert job.result().num_saved == 2


def test_rule_17_jobs_of_one_request_end_each_for_itself(pool: KVPool, engine: ToyEngine) -> None:
    hashes, event = prompt("rule 17", 4), Waiting()
    engine.compute(hashes, [[1, 2, 3, 4]])
    older = pool.save(to_save(hashes, [[1, 2]], 32, "same"), event=event)
    event.gate.wait_until_reached()
    newer = pool.save(to_save(hashes, [[1, 2, 3, 4]], 64, "same"))
    assert not newer.done()
    event.gate.open()
    assert (older.result().num_saved, newer.result().num_saved, newer.result().num_present) == (2, 2, 2)


def test_rule_18_what_was_queued_does_not_change(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes, event = prompt("rule 18", 2), Waiting()
    tracker = RequestTracker("request", 32, ([1, 2],))
    engine.compute(hashes, [[1, 2]])
    blocker = pool.save(to_save(prompt("blocker", 1), [[9]], 16), event=event)
    event.gate.wait_until_reached()
    meta = ReqMeta.from_request_tracker(tracker, 16, block_hashes=hashes)
    assert meta is not None
    job = pool.save(meta)
    tracker.reset()
    meta.block_ids[0][:] = [20, 21]
    meta.token_len_chunk = 16
    hashes += prompt("appended", 3)
    event.gate.open()
    blocker.result()
    assert job.result().num_saved == 2
    assert [store.pool.read(key) for key in keys_of(hashes[:2])] == [engine.object_bytes(one) for one in hashes[:2]]


@pytest.mark.parametrize("kind", ["nothing", "present", "unwanted", "null", "failure", "raise", "event", "bad"])
def test_rule_19_every_save_ends_once(pool: KVPool, engine: ToyEngine, store: MemoryStore, kind: str) -> None:
    hashes, ends = prompt("rule 19", 2), []
    engine.compute(hashes, [[1, 2]])
    meta = to_save(hashes, [[1, 2]], 32)
    event = None
    if kind == "nothing":
        meta.token_len_chunk = 15
    elif kind == "present":
        pool.save(meta).result()
    elif kind == "unwanted":
        meta.can_save = False
    elif kind == "null":
        meta.block_ids[0][:] = [0, 0]
    elif kind == "failure":
        store.faults.add(Fault(call="put", indices={0}, code=-800))
    elif kind == "raise":
        store.faults.add(Fault(call="put", error=ConnectionError("gone")))
    elif kind == "event":

        class Broken:
            def synchronize(self) -> None:
                raise ValueError("event")

        event = Broken()
    else:
        meta.block_ids[0].pop()
    job = pool.save(meta, event=event)
    job.add_done_callback(lambda _: ends.append(threading.current_thread().name))
    error = job.exception(timeout=30)
    assert isinstance(error, {"event": ValueError, "bad": IndexError}.get(kind, type(None)))
    assert pool.save(to_save(hashes, [[1, 2]], 32)).result().is_complete
    assert len(ends) == 1


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


def test_rule_21_a_thread_that_ends_is_noticed_at_the_next_call(pool: KVPool, engine: ToyEngine) -> None:
    class Exit:
        def synchronize(self) -> None:
            raise SystemExit

    hashes = prompt("rule 21", 1)
    engine.compute(hashes, [[1]])
    busy = Waiting()
    first = pool.save(to_save(prompt("busy", 1), [[2]], 16), event=busy)
    busy.gate.wait_until_reached()
    job = pool.save(to_save(hashes, [[1]], 16), event=Exit())
    waiting = pool.save(to_save(hashes, [[1]], 16))
    busy.gate.open()
    first.result()
    assert isinstance(job.exception(30), SystemExit)
    assert isinstance(waiting.exception(30), StoreError)
    with pytest.raises(StoreError, match="a save thread ended with SystemExit"):
        pool.save(to_save(hashes, [[1]], 16))


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


# Lookup


@pytest.mark.parametrize("error", [ConnectionError("gone"), MemoryError(), StoreError("closed")])
def test_rule_27_a_lookup_that_fails_is_0_and_stops_none_after_it(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, error: Exception
) -> None:
    hashes = prompt("rule 27", 3)
    saved(pool, engine, hashes, [1, 2, 3])
    store.faults.add(Fault(call="exists", error=error))
    assert [pool.lookup(49, hashes) for _ in range(2)] == [0, 48]
    store.faults.add(Fault(call="exists", code=-900))
    assert [pool.lookup(49, hashes) for _ in range(2)] == [0, 48]
    assert pool.metrics().counts["lookups_failed"] == 2


def test_rule_27_a_lookup_that_hangs_is_0_in_time_and_stops_none_after_it(
    store: MemoryStore, engine: ToyEngine
) -> None:
    hashes, gate = prompt("rule 27", 3), Gate()
    limits = PoolLimits(num_lookup_threads=2, max_stuck_lookups=3)
    with open_pool(store, engine, limits=limits) as pool:
        saved(pool, engine, hashes, [1, 2, 3])
        store.faults.add(Fault(call="exists", before=gate.hold, times=5))
        assert [pool.lookup(49, hashes, timeout=0.05) for _ in range(5)] == [0] * 5
        assert pool.lookup(49, hashes, timeout=600.0) == 0  # all threads hang: not asked at all
        assert pool.metrics().counts["lookups_late"] == 5
        gate.open()
        pool._lookups._changed.acquire()
        pool._lookups._changed.wait_for(lambda: not pool._lookups._num_stuck, 30)
        pool._lookups._changed.release()
        assert pool.lookup(49, hashes) == 48


def test_rule_28_a_cold_prompt_asks_for_a_few_hundred_keys(pool: KVPool, log: list[Call]) -> None:
    hashes = [number.to_bytes(32, "big") for number in range(62_500)]
    assert pool.lookup(1_000_000, hashes) == 0
    assert sum(len(call.keys) for call in log if call.name == "exists") <= 512


def test_rule_29_waiting_requests_do_not_block_the_caller(store: MemoryStore, engine: ToyEngine) -> None:
    gate = Gate()
    prompts = [prompt(f"request {number}", 2) for number in range(64)]
    with open_pool(store, engine) as pool:
        for hashes in prompts[::2]:
            saved(pool, engine, hashes, [1, 2])
        store.faults.add(Fault(call="exists", before=gate.hold, times=None))
        answers = [pool.lookup_async(33, hashes, timeout=60.0) for hashes in prompts]
        assert not any(answer.done() for answer in answers)  # the caller is here while the store has not answered one
        gate.open()
        assert [answer.result() for answer in answers] == [32, 0] * 32


def test_equal_lookups_on_their_way_are_asked_once(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes, gate = prompt("equal", 3), Gate()
    saved(pool, engine, hashes, [1, 2, 3])
    fault = store.faults.add(Fault(call="exists", before=gate.hold, times=None))
    answers = [pool.lookup_async(49, list(hashes), timeout=60.0) for _ in range(10)]
    gate.wait_until_reached()
    gate.open()
    assert [answer.result() for answer in answers] == [48] * 10
    assert store.faults.num_times(fault) == 1
    assert pool.metrics().counts["lookups_shared"] == 9


# Operations


def test_rule_32_reset_removes_one_namespace_and_leaves_the_others(store: MemoryStore) -> None:
    hashes, pools = prompt("rule 32", 2), []
    names = [("m", ""), ("m", "a"), ("m2", ""), ("mm", ""), ("m", "a.b"), ("m", "aXb"), ("m@x", ""), ("x/m", "")]
    for model_name, cache_prefix in names:
        engine = ToyEngine([FULL, CacheGroup.recurrent(16)])
        pool = KVPool.open(model_name=model_name, groups=engine.groups, store=store, cache_prefix=cache_prefix)
        engine.register(pool)
        pool.save(to_save(hashes, [[1, 2], [3, 4]], 32)).result()
        pools.append(pool)
    for number, pool in enumerate(pools):
        assert pool.lookup(33, hashes) == 32
        assert pool.reset() == 4
        assert [one.lookup(33, hashes) for one in pools] == [0] * (number + 1) + [32] * (len(pools) - number - 1)
    for pool in pools:
        pool.close()


def test_rule_33_a_master_that_comes_back_serves_the_same_pool(
    pool: KVPool, engine: ToyEngine, store: MemoryStore
) -> None:
    hashes = prompt("rule 33", 3)
    saved(pool, engine, hashes, [1, 2, 3])
    store.pool.stop_master()
    assert pool.lookup(49, hashes) == 0
    assert [chunk.code for chunk in saved(pool, engine, hashes, [1, 2, 3]).failed] == [-900] * 3
    assert loaded(pool, hashes, [4, 5, 6]).num_tokens == 0
    store.pool.start_master()
    assert pool.lookup(49, hashes) == 0
    assert loaded(pool, hashes, [4, 5, 6]).codes == {-704: 2}
    assert saved(pool, engine, hashes, [1, 2, 3]).is_complete
    assert pool.lookup(49, hashes) == 48


def test_rule_34_events_are_whatever_can_be_waited_for(pool: KVPool, engine: ToyEngine) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            order.append(self.name)

    hashes = prompt("rule 34", 1)
    engine.compute(hashes, [[1]])
    meta = to_save(hashes, [[1]], 16)
    meta.current_event = Event("of the request")  # type: ignore[assignment]
    assert pool.save(meta, event=Event("given")).result().num_saved == 1
    assert order == ["of the request", "given"]
    pool.load(to_load(hashes, [[2]], 16), event=Event("of a load")).result()
    assert order[2:] == ["of a load"]


def test_rule_35_completed_bytes_are_counted_in_both_directions(
    pool: KVPool, engine: ToyEngine, store: MemoryStore
) -> None:
    hashes = prompt("rule 35", 4)
    store.faults.add(Fault(call="put", keys={keys_of(hashes)[3]}, code=-800))
    saved(pool, engine, hashes, [1, 2, 3, 4])
    store.faults.add(Fault(call="get", keys={keys_of(hashes)[1]}, code=-707))
    loaded(pool, hashes[:3], [5, 6, 7])
    counts = pool.metrics().counts
    assert (counts["saved_bytes"], counts["saved_keys"]) == (3 * 192, 3)
    assert (counts["loaded_bytes"], counts["loaded_keys"]) == (192, 1)


@pytest.mark.parametrize("num_addrs", [2, 3, 7, 64])
def test_rule_36_no_more_addresses_are_in_flight_than_the_transport_takes(store: MemoryStore, num_addrs: int) -> None:
    engine = ToyEngine([FULL])
    lock, in_flight, most = threading.Lock(), [0], [0]
    put, get = store.batch_put_from_multi_buffers, store.batch_get_into_multi_buffers

    def counted(call: Callable[..., list[int]], *args: Sequence[Sequence[int]]) -> list[int]:
        num = sum(map(len, args[1]))
        with lock:
            in_flight[0] += num
            most[0] = max(most[0], in_flight[0])
        try:
            return call(*args)
        finally:
            with lock:
                in_flight[0] -= num

    store.batch_put_from_multi_buffers = partial(counted, put)  # type: ignore[method-assign]
    store.batch_get_into_multi_buffers = partial(counted, get)  # type: ignore[method-assign]
    limits = PoolLimits(max_addrs_in_flight=num_addrs, num_save_threads=3, num_load_threads=3)
    prompts = [prompt(f"rule 36 {number}", 8) for number in range(6)]
    with open_pool(store, engine, limits=limits) as pool:
        jobs = [pool.save(to_save(hashes, [[1, 2, 3, 4, 5, 6, 7, 8]], 128)) for hashes in prompts]
        assert all(job.result().is_complete for job in jobs)
        loads = [pool.load(to_load(hashes, [[9, 10, 11, 12, 13, 14, 15, 16]], 128)) for hashes in prompts]
        assert all(job.result().is_complete for job in loads)
        assert pool._budget.most_in_flight == most[0] <= num_addrs
        with pytest.raises(LayoutError, match=rf"65 regions, but the transport takes {num_addrs} addresses"):
            ToyEngine([FULL], num_layers=65).register(pool)


def test_rule_37_what_was_lost_is_saved_again(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes = prompt("rule 37", 3)
    assert saved(pool, engine, hashes, [1, 2, 3]).num_saved == 3
    assert saved(pool, engine, hashes, [1, 2, 3]).num_present == 3
    store.pool.drop(keys_of(hashes)[1:2])
    assert saved(pool, engine, hashes, [1, 2, 3]).num_saved == 1
    assert pool.lookup(49, hashes) == 48


def test_rule_37_an_object_whose_owner_died_is_saved_again() -> None:
    clock = ManualClock()
    memory = MemoryPool(0, clock=clock)
    owner, other = MemoryStore(memory, segment_bytes=1 << 20), MemoryStore(memory)
    engine, hashes = ToyEngine([FULL]), prompt("rule 37", 3)
    with open_pool(other, engine, limits=NO_PAUSE) as pool:
        assert saved(pool, engine, hashes, [1, 2, 3]).num_saved == 3
        owner.die()
        assert loaded(pool, hashes, [4, 5, 6]).num_tokens == 0
        clock.advance(11.0)
        with MemoryStore(memory, segment_bytes=1 << 20):
            assert pool.lookup(49, hashes) == 0
            assert saved(pool, engine, hashes, [1, 2, 3]).num_saved == 3
            assert loaded(pool, hashes, [4, 5, 6]).num_tokens == 48
