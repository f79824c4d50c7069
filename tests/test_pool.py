"""Opening, registering, refusing and closing a `KVPool`."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from mooncrate import CacheGroup, KVPool, Namespace, PoolLimits, RankTopology, SaveResult, StoreConfig, config
from mooncrate.config import StoreConnection
from mooncrate.data import LoadSpec
from mooncrate.errors import ConfigError, LayoutError, StoreError
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.results import SkipReason
from mooncrate.store import GuardedStore, Transport
from mooncrate.store_faults import Fault, Gate
from mooncrate.transfers import Request
from mooncrate.workers import LoadWorker, SaveWorker
from toy_engine import ToyEngine, prompt, to_load, to_save

FULL = CacheGroup.full_attention(16)


@pytest.fixture
def log() -> list[Call]:
    return []


@pytest.fixture
def store(log: list[Call]) -> MemoryStore:
    return MemoryStore(log=log)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([FULL])


@pytest.fixture
def pool(store: MemoryStore, engine: ToyEngine) -> Iterator[KVPool]:
    with KVPool.open(model_name="m", groups=[FULL], store=store) as opened:
        engine.register(opened)
        yield opened


def open_pool(store: MemoryStore, **options: object) -> KVPool:
    return KVPool.open(**{"model_name": "m", "groups": [FULL], "store": store, **options})  # type: ignore[arg-type]


# Opening


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": []}, "0 KV cache groups"),
        ({"hash_block_size": 5}, "5"),
        ({"hash_block_size": 0}, "0"),
        ({"groups": [CacheGroup.full_attention(16, tp_replicas=3)]}, "3 replicas"),
        ({"namespace": Namespace(tp_size=4)}, "tp_size is 4, but it was found to be 1"),
        ({"namespace": Namespace(block_size=32)}, "block_size is 32, but it was found to be 16"),
        ({"namespace": Namespace(block_size=(16, 16))}, "2 values for 1 groups"),
        ({"null_block_id": "0"}, "null_block_id"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_connected(
    store: MemoryStore, options: dict[str, object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        open_pool(store, **options)


def test_a_pool_has_one_store(store: MemoryStore) -> None:
    with pytest.raises(StoreError, match="both config and store"):
        open_pool(store, config=StoreConfig.embedded())


def test_without_config_and_store_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: MemoryStore
) -> None:
    seen = []

    def connect(self: StoreConfig) -> StoreConnection:
        seen.append(self)
        return StoreConnection(GuardedStore(store, is_set_up=True))

    monkeypatch.setattr(StoreConfig, "connect", connect)
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "10.0.0.1:1", "protocol": "tcp"}))
    monkeypatch.setenv(config.CONFIG_PATH_VARIABLE, str(path))
    KVPool.open(model_name="m", groups=[FULL]).close()
    monkeypatch.delenv(config.CONFIG_PATH_VARIABLE)
    KVPool.open(model_name="m", groups=[FULL]).close()
    assert [(one.master_server_address, one.owns_master) for one in seen] == [
        ("10.0.0.1:1", False),
        ("127.0.0.1:0", True),
    ]
    monkeypatch.setenv(config.CONFIG_PATH_VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        KVPool.open(model_name="m", groups=[FULL])


def test_hashes_are_as_fine_as_all_groups_need(store: MemoryStore) -> None:
    groups = [CacheGroup.full_attention(32), CacheGroup.full_attention(48)]
    hashes = prompt("fine", 12)  # of 16 tokens
    engine = ToyEngine(groups, hash_block_size=16)
    block_ids = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    with open_pool(store, groups=groups) as pool:
        engine.register(pool)
        engine.compute(hashes, block_ids)
        assert pool.save(to_save(hashes, block_ids, 192)).result().num_saved == 10
        assert pool.lookup(193, hashes) == 192
        assert pool.lookup(192, hashes) == 96


def test_the_parts_of_the_api_are_exported_and_cost_no_torch_and_no_mooncake() -> None:
    code = (
        "import sys, mooncrate; from mooncrate import *;"
        "assert not {'torch', 'mooncake', 'prometheus_client', 'vllm'} & set(sys.modules);"
        "KVPool, CacheGroup, StoreConfig, RankTopology, Namespace, LoadResult, SaveResult, LookupPlan, TransferPlan"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Registering


def test_a_pool_that_only_looks_up_needs_no_registration(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    hashes = prompt("only", 3)
    engine.compute(hashes, [[1, 2, 3]])
    pool.save(to_save(hashes, [[1, 2, 3]], 48)).result()
    with open_pool(store) as router:
        assert router.lookup(49, hashes) == 48
        for call in (router.save, router.load):
            with pytest.raises(StoreError, match="before register_kv_caches"):
                call(to_load(hashes, [[1, 2, 3]], 48))


def test_the_number_of_groups_is_checked(store: MemoryStore, engine: ToyEngine) -> None:
    with open_pool(store) as pool, pytest.raises(LayoutError, match="2 groups for a pool of 1"):
        pool.register_kv_caches([engine.caches[0]] * 2, 32)


def test_registered_again_the_new_memory_counts(pool: KVPool, log: list[Call]) -> None:
    hashes = prompt("again", 2)
    other = ToyEngine([FULL], num_blocks=4)
    other.register(pool)
    other.compute(hashes, [[1, 2]])
    assert pool.save(to_save(hashes, [[1, 2]], 32)).result().num_saved == 2
    with pytest.raises(LayoutError, match="7"):
        pool.save(to_save(hashes, [[7, 2]], 32)).result()
    names = [call.name for call in log]
    assert names[:6] == ["register", "register", "unregister", "unregister", "register", "register"]


def test_memory_is_not_registered_anew_under_a_job(pool: KVPool, engine: ToyEngine, store: MemoryStore) -> None:
    gate, hashes = Gate(), prompt("under", 1)
    store.faults.add(Fault(call="put", before=gate.hold))
    job = pool.save(to_save(hashes, [[1]], 16))
    gate.wait_until_reached()
    with pytest.raises(StoreError, match="1 jobs"):
        engine.register(pool)
    gate.open()
    assert job.result().num_saved == 1
    engine.register(pool)


def test_a_job_that_was_being_queued_meanwhile_does_not_touch_the_old_memory(
    pool: KVPool, engine: ToyEngine, log: list[Call]
) -> None:
    channel, hashes = pool._registered("save"), prompt("meanwhile", 2)
    engine.register(pool)
    log.clear()
    saved = SaveWorker(channel, pool._backoff).save(Request.of(to_save(hashes, [[1, 2]], 32), None, 32))
    loaded = LoadWorker(channel).load(Request.of(to_load(hashes, [[1, 2]], 32), None, 32))
    assert (saved.skipped, loaded.failed_block_ids) == (SkipReason.CLOSED, (frozenset({1, 2}),))
    assert not log


def test_the_pool_keeps_the_tensors_until_it_is_closed(store: MemoryStore) -> None:
    tensor = torch.zeros(4, 8)
    seen = weakref.ref(tensor)
    with open_pool(store) as pool:
        pool.register_kv_caches({"layer": tensor}, 4)
        del tensor
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_device_memory_is_refused_where_the_wheel_would_follow_the_pointer(store: MemoryStore) -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    guarded = GuardedStore(store, is_set_up=True, transport=Transport(None, has_device_memory=False))
    pool = open_pool(store)
    pool._store, pool._connection = guarded, StoreConnection(guarded)
    with pytest.raises(StoreError, match="'layer' lies on cuda:0"):
        pool.register_kv_caches({"layer": torch.zeros(4, 8).as_subclass(Elsewhere)}, 4)
    pool.register_kv_caches({"layer": torch.zeros(4, 8)}, 4)
    pool.close()


# Requests


def test_saves_and_loads_say_what_is_wrong_with_a_request(pool: KVPool) -> None:
    hashes = prompt("wrong", 2)
    assert pool.save(to_load(hashes, [[1, 2]], 32)).result().skipped is SkipReason.NOT_WANTED
    with pytest.raises(LayoutError, match="nothing to load"):
        pool.load(to_save(hashes, [[1, 2]], 32))
    meta = to_load(hashes, [[1, 2]], 32)
    for spec in (LoadSpec(0, -16, True), LoadSpec(-1, 16, True), LoadSpec(0, 32, False)):
        meta.load_spec = spec
        with pytest.raises(LayoutError):
            pool.load(meta)
    for job in (
        pool.save(to_save(hashes, [[1, 2], [3, 4]], 32)),
        pool.load(to_load(hashes, [[1, 2], [3, 4]], 32)),
    ):
        with pytest.raises(LayoutError, match="block tables for 2 KV cache groups, not 1"):
            job.result()
    for short in (hashes, []):
        message = rf"has {len(short)} hashes of 16 tokens for 48 tokens"
        for job in (pool.save(to_save(short, [[1, 2, 3]], 48)), pool.load(to_load(short, [[1, 2, 3]], 48))):
            with pytest.raises(LayoutError, match=message):
                job.result()
    with pytest.raises(LayoutError, match="timeout"):
        pool.lookup(32, hashes, timeout=-1.0)


@pytest.mark.parametrize("hashes", [[], prompt("short", 1)])
def test_a_lookup_without_a_whole_hash_is_0(pool: KVPool, log: list[Call], hashes: list[bytes]) -> None:
    log.clear()
    assert pool.lookup(15, hashes) == 0
    assert not log


def test_a_full_queue_refuses_saves_and_blocks_loads(store: MemoryStore, engine: ToyEngine) -> None:
    limits = PoolLimits(max_queued_saves=2, max_queued_loads=1, num_load_threads=1)
    hashes, put_gate, get_gate = prompt("full", 1), Gate(), Gate()
    with open_pool(store, limits=limits) as pool:
        engine.register(pool)
        store.faults.add(Fault(call="put", before=put_gate.hold))
        saves = [pool.save(to_save(hashes, [[1]], 16))]
        put_gate.wait_until_reached()
        saves += [pool.save(to_save(hashes, [[1]], 16)) for _ in range(3)]
        assert saves[3].result(timeout=0).skipped is SkipReason.QUEUE_FULL
        assert pool.metrics().queue_depths["save"] == 2
        put_gate.open()
        assert [job.result().num_saved for job in saves] == [1, 0, 0, 0]
        assert pool.metrics().counts["saves_refused"] == 1

        store.faults.add(Fault(call="get", before=get_gate.hold))
        loads = [pool.load(to_load(hashes, [[2]], 16))]
        get_gate.wait_until_reached()
        loads.append(pool.load(to_load(hashes, [[3]], 16)))
        thread = threading.Thread(target=lambda: loads.append(pool.load(to_load(hashes, [[4]], 16))))
        thread.start()
        assert len(loads) == 2
        get_gate.open()
        thread.join()
        assert [job.result().num_tokens for job in loads] == [16, 16, 16]


# Closing


def test_after_close_nothing_reaches_the_store_and_the_store_stays_open(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, log: list[Call]
) -> None:
    hashes = prompt("close", 2)
    pool.close()
    pool.close()
    log.clear()
    with pytest.raises(StoreError, match=r"after close\(\)"):
        pool.save(to_save(hashes, [[1, 2]], 32))
    with pytest.raises(StoreError, match=r"after close\(\)"):
        pool.load(to_load(hashes, [[1, 2]], 32))
    with pytest.raises(StoreError, match=r"after close\(\)"):
        pool.lookup(33, hashes)
    with pytest.raises(StoreError, match=r"after close\(\)"):
        pool.reset()
    with pytest.raises(StoreError, match=r"after close\(\)"):
        engine.register(pool)
    assert not log
    assert pool.metrics().counts["saves"] == 0
    assert store.batch_is_exist(["key"]) == [0]


def test_close_lets_what_is_queued_finish(store: MemoryStore, engine: ToyEngine) -> None:
    gate, prompts = Gate(), [prompt(f"drain {number}", 2) for number in range(8)]
    store.faults.add(Fault(call="put", before=gate.hold))
    pool = open_pool(store)
    engine.register(pool)
    jobs = [pool.save(to_save(hashes, [[1, 2]], 32)) for hashes in prompts]
    gate.wait_until_reached()
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.open()
    closing.join()
    assert all(job.result(timeout=0).is_complete for job in jobs)


def test_close_stops_what_does_not_finish_before_its_next_call(
    store: MemoryStore, engine: ToyEngine, log: list[Call]
) -> None:
    gate, hashes = Gate(), prompt("stop", 4)
    pool = open_pool(store, limits=PoolLimits(max_batch_integers=4, num_load_threads=1))
    engine.register(pool)
    engine.compute(hashes, [[1, 2, 3, 4]])
    assert pool.save(to_save(hashes, [[1, 2, 3, 4]], 64)).result().is_complete
    store.faults.add(Fault(call="get", skip=1, before=gate.hold))
    jobs = [pool.load(to_load(hashes, [[5, 6, 7, 8]], 64)) for _ in range(3)]
    gate.wait_until_reached()

    def open_when_stopped() -> None:
        pool._stop.wait()
        gate.open()

    stopped = threading.Thread(target=open_when_stopped)
    stopped.start()
    pool.close(timeout=2.0)
    stopped.join()
    results = [job.result(timeout=0) for job in jobs]
    assert [result.num_tokens for result in results] == [32, 0, 0]
    assert [result.failed_block_ids for result in results] == [
        (frozenset({7, 8}),),
        (frozenset({5, 6, 7, 8}),),
        (frozenset({5, 6, 7, 8}),),
    ]
    assert sum(call.name == "get" for call in log) == 2


def test_close_ends_every_job_when_a_call_hangs(store: MemoryStore, engine: ToyEngine) -> None:
    gate, hashes = Gate(), prompt("hang", 1)
    store.faults.add(Fault(call="put", before=gate.hold))
    pool = open_pool(store)
    engine.register(pool)
    jobs = [pool.save(to_save(hashes, [[1]], 16)) for _ in range(3)]
    lookup = pool.lookup_async(17, hashes)
    gate.wait_until_reached()
    with pytest.raises(StoreError, match="1 calls on the store still run"):
        pool.close(timeout=0.1)
    assert lookup.result(timeout=0) == 0
    for job in jobs:
        with pytest.raises(StoreError, match="a call hangs in the store"):
            job.result(timeout=0)
    gate.open()
    pool.close()


def test_close_ends_a_load_that_waits_for_room(store: MemoryStore, engine: ToyEngine) -> None:
    gate, hashes = Gate(), prompt("room", 1)
    pool = open_pool(store, limits=PoolLimits(max_queued_loads=1, num_load_threads=1))
    engine.register(pool)
    store.faults.add(Fault(call="get", before=gate.hold))
    first = pool.load(to_load(hashes, [[1]], 16))
    gate.wait_until_reached()
    second = pool.load(to_load(hashes, [[1]], 16))
    errors: list[BaseException] = []

    def load() -> None:
        try:
            pool.load(to_load(hashes, [[1]], 16))
        except StoreError as error:
            errors.append(error)
            gate.open()

    waiting = threading.Thread(target=load)
    waiting.start()
    pool.close()
    waiting.join()
    assert len(errors) == 1
    assert first.done()
    assert second.done()


def test_close_may_come_from_a_callback_and_from_many_threads(store: MemoryStore, engine: ToyEngine) -> None:
    hashes = prompt("callback", 1)
    pool = open_pool(store)
    engine.register(pool)
    closed = threading.Event()
    job = pool.save(to_save(hashes, [[1]], 16))

    def close(_: Future[SaveResult]) -> None:
        pool.close()
        closed.set()

    job.add_done_callback(close)
    assert closed.wait(30)
    threads = [threading.Thread(target=pool.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_rule_38_a_forked_child_is_refused_and_the_parent_goes_on(pool: KVPool, engine: ToyEngine) -> None:
    hashes = prompt("fork", 1)
    engine.compute(hashes, [[1]])
    reader, writer = os.pipe()
    pool._recorder._lock.acquire()  # as another thread might at that moment; in the child nobody lets go of it
    child = os.fork()
    if child:
        pool._recorder._lock.release()
    else:
        refused = 0
        for call in (
            lambda: pool.lookup(17, hashes),
            lambda: pool.save(to_save(hashes, [[1]], 16)),
            lambda: pool.load(to_load(hashes, [[1]], 16)),
            lambda: engine.register(pool),
            pool.reset,
        ):
            try:
                call()
            except StoreError as error:
                refused += "forked from process" in str(error)
        pool.close()
        refused += pool.metrics().counts["lookups"]  # 0, and an answer, though the lock was held at the fork
        os.write(writer, str(refused).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        assert answers.read() == "5"
    os.waitpid(child, 0)
    assert pool.save(to_save(hashes, [[1]], 16)).result().num_saved == 1


def test_a_wide_topology_looks_up_every_namespace(store: MemoryStore, log: list[Call]) -> None:
    topology = RankTopology(tp_size=4, pp_size=2)
    hashes: Sequence[bytes] = prompt("wide", 2)
    with open_pool(store, topology=topology) as pool:
        keys = [prefix for prefixes, _ in pool._keys.lookup_groups() for prefix in prefixes]
        assert len(set(keys)) == 8
        assert pool.lookup(33, hashes) == 0
    assert sum(len(call.keys) for call in log) == 2


# What connectors ask of a save


def test_chunks_that_the_pool_has_for_certain_are_not_asked_for(store: MemoryStore) -> None:
    engine = ToyEngine([CacheGroup.full_attention(16), CacheGroup.full_attention(32)], hash_block_size=16)
    hashes, tables = prompt("a", 6), ([1, 2, 3, 4, 5, 6], [11, 12, 13])
    with KVPool.open(model_name="m", groups=engine.groups, store=store, hash_block_size=16) as pool:
        engine.register(pool)
        engine.compute(hashes, tables)
        result = pool.save(to_save(hashes, tables, 96), num_saved_tokens=48, lists_saved=True).result()
        # Of the second group's chunk from 32 to 64 the pool has a part at most: it is saved whole.
        assert sorted(result.saved_chunks) == [(0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]
        assert result.is_complete
        assert pool.lookup(97, hashes) == 0
        assert pool.save(to_save(hashes, tables, 96)).result().saved_chunks == ()
        assert pool.lookup(97, hashes) == 96
        with pytest.raises(LayoutError, match="num_saved_tokens is -1, less than 0"):
            pool.save(to_save(hashes, tables, 96), num_saved_tokens=-1)


def test_a_mask_says_which_chunks_are_worth_saving(store: MemoryStore) -> None:
    engine = ToyEngine([CacheGroup.full_attention(16), CacheGroup.sliding_window(16, 17)])
    hashes, tables = prompt("a", 6), ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16])
    asked = []

    def mask(group_id: int, start_chunk: int, end_chunk: int) -> list[bool] | None:
        asked.append((group_id, start_chunk, end_chunk))
        return [chunk == 5 for chunk in range(start_chunk, end_chunk)] if group_id == 1 else None

    with KVPool.open(model_name="m", groups=engine.groups, store=store) as pool:
        engine.register(pool)
        engine.compute(hashes, tables)
        save = pool.save(to_save(hashes, tables, 96), num_saved_tokens=32, lists_saved=True, chunk_mask=mask)
        assert sorted(save.result().saved_chunks) == [(0, 2), (0, 3), (0, 4), (0, 5), (1, 5)]
        assert save.result().is_complete
        assert asked == [(0, 2, 6), (1, 2, 6)]


def test_what_a_put_is_to_be_told_goes_with_each() -> None:
    class Listening(MemoryStore):
        """Keeps the configuration of puts."""

        seen: ClassVar[list[object]] = []

        def batch_put_from_multi_buffers(
            self,
            keys: list[str],
            all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]],
            config: object = None,
        ) -> list[int]:
            self.seen.append(config)
            return super().batch_put_from_multi_buffers(keys, all_buffer_ptrs, all_sizes, config)

    engine, config = ToyEngine([CacheGroup.full_attention(16)]), object()
    hashes = prompt("a", 2)
    with KVPool.open(model_name="m", groups=engine.groups, store=Listening(), put_config=config) as pool:
        engine.register(pool)
        assert pool.save(to_save(hashes, [[1, 2]], 32)).result().num_saved == 2
    assert Listening.seen == [config]
