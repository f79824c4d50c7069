"""The rules on keys, addresses, boundaries and the life of blocks, one or more tests each, on a store in memory."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest

from mooncrate import CacheGroup, KVPool, LoadResult, Namespace, PoolLimits, RankTopology, SaveResult
from mooncrate.data import BlobBlockHashes, KeyMetadata, PoolKey, ReqMeta, RequestTracker
from mooncrate.errors import LayoutError, StoreError
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.store_faults import Fault
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


@pytest.mark.parametrize("form", ["list", "buffer"])
def test_rule_18_hashes_that_are_overwritten_do_not_rename_a_queued_save(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, form: str
) -> None:
    hashes, others, event = prompt("rule 18", 2), prompt("another request", 2), Waiting()
    engine.compute(hashes, [[1, 2]])
    blocker = pool.save(to_save(prompt("blocker", 1), [[9]], 16), event=event)
    event.gate.wait_until_reached()
    blob, given = bytearray(b"".join(hashes)), list(hashes)
    view: Any = BlobBlockHashes(blob, len(hashes[0])) if form == "buffer" else given
    job = pool.save(to_save(view, [[1, 2]], 32))
    given[:], blob[:] = others, b"".join(others)
    event.gate.open()
    blocker.result()
    assert job.result().num_saved == 2
    assert [store.pool.read(key) for key in keys_of(hashes)] == [engine.object_bytes(one) for one in hashes]
    assert store.batch_is_exist(keys_of(others)) == [0, 0]


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
