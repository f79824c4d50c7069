"""The rules on lookups and operations, one or more tests each, on a store in memory that is told what to do wrong."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from mooncrate import CacheGroup, KVPool, LoadResult, PoolLimits, SaveResult
from mooncrate.data import KeyMetadata, PoolKey
from mooncrate.errors import LayoutError, StoreError
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import Call, MemoryStore
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
        # A thread that has its share may not be in the store yet, so the store saw no more than the budget gave out.
        assert most[0] <= pool._budget.most_in_flight <= num_addrs
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
