"""The workers' side: all ranks of an engine save and load real tensors through one store in memory.

Each rank has the bytes that its shard of the KV cache has, so that a chunk that ended up under another rank's key, or
in another block, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch

from connector_parts import (
    LAYERS_PER_GROUP,
    NUM_BLOCKS,
    connector_module,
    full_spec,
    make_layout,
    make_request,
    mla_spec,
    open_pool,
    sliding_spec,
    vllm_config,
)
from mooncrate import KVPool
from mooncrate.data import LoadSpec, ReqMeta
from mooncrate.errors import StoreError
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import MemoryStore
from mooncrate.store_faults import Fault, Gate
from vllm_import import import_vllm

pytestmark = pytest.mark.vllm_version("0.32.0")

SHAPE: Final = (NUM_BLOCKS, 1, 16, 4)


@dataclass
class Rank:
    """One worker with its KV cache."""

    worker: Any
    pool: KVPool
    store: MemoryStore
    shards: tuple[int, ...]
    """Per group, what tells this rank's bytes from others'."""
    caches: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, chunk_hash: bytes, group: int, block_id: int) -> None:
        """Computes a block."""
        for layer in range(LAYERS_PER_GROUP):
            self.caches[f"group {group} layer {layer}"][block_id] = self.content(chunk_hash, group, layer)

    def holds(self, chunk_hash: bytes, group: int, block_id: int) -> bool:
        """Tells whether a block has the bytes that this rank would compute."""
        return all(
            torch.equal(self.caches[f"group {group} layer {layer}"][block_id], self.content(chunk_hash, group, layer))
            for layer in range(LAYERS_PER_GROUP)
        )

    def content(self, chunk_hash: bytes, group: int, layer: int) -> torch.Tensor:
        """What a block has."""
        start = int.from_bytes(chunk_hash[:2], "big") + 1000 * self.shards[group] + 100 * layer + 10 * group
        return torch.arange(start, start + 64, dtype=torch.float32).reshape(SHAPE[1:])


class Engine:
    """All ranks of an engine."""

    def __init__(self, *specs: Any, num_kv_heads: int = 8, **config: Any) -> None:  # noqa: ANN401
        load_async, has_events = config.pop("load_async", True), config.pop("has_events", False)
        sizes = {"num_kv_heads": num_kv_heads, **config}
        self.layout = make_layout(*specs, **sizes)
        self.objects = MemoryPool()
        tp, pp = config.get("tp", 1), config.get("pp", 1)
        self.ranks = [self._rank(rank, tp, sizes, load_async, has_events) for rank in range(tp * pp)]

    def _rank(self, rank: int, tp: int, sizes: dict[str, Any], load_async: bool, has_events: bool) -> Rank:
        topology = connector_module("layout").topology_of(vllm_config(**sizes), tp_rank=rank % tp, rank=rank)
        store = MemoryStore(self.objects)
        pool = open_pool(self.layout, store, topology)
        worker = connector_module("worker").WorkerSide(pool, self.layout, load_async=load_async, has_events=has_events)
        shards = tuple(100 * topology.pp_rank + topology.tp_rank // group.tp_replicas for group in self.layout.groups)
        made = Rank(worker, pool, store, shards)
        made.caches = {name: torch.zeros(SHAPE) for name in sorted(self.layout.layer_names)}
        worker.register_kv_caches(made.caches)
        return made

    def compute(self, hashes: list[bytes], tables: tuple[list[int], ...]) -> None:
        for rank in self.ranks:
            for group, table in enumerate(tables):
                for chunk_hash, block_id in zip(hashes, table, strict=False):
                    if block_id:
                        rank.fill(chunk_hash, group, block_id)

    def wipe(self) -> None:
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache.fill_(-1)

    def run(self, orders: Any) -> list[Any]:  # noqa: ANN401
        """Runs a step on all ranks to its end; returns what each reports."""
        for rank in self.ranks:
            rank.worker.start_loads(orders)
            rank.worker.start_saves(orders)
        return [self.settle(rank) for rank in self.ranks]

    @staticmethod
    def settle(rank: Rank) -> Any:  # noqa: ANN401
        while rank.worker.num_jobs:
            rank.worker.wait_for_any()
        return rank.worker.take_report()

    def close(self) -> None:
        for rank in self.ranks:
            rank.pool.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(full_spec())
    yield made
    made.close()


def save_order(
    hashes: list[bytes],
    tables: tuple[list[int], ...],
    job_id: int = 0,
    num_saved: int = 0,
    **more: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    num_tokens = len(hashes) * 16
    req = ReqMeta("a", num_tokens, tables, hashes, can_save=True, num_prompt_tokens=num_tokens + 1, **more)
    metadata = connector_module("metadata")
    return metadata.StepOrders(saves=[metadata.SaveOrder(job_id, req, num_saved)])


def load_order(
    hashes: list[bytes], tables: tuple[list[int], ...], num_tokens: int, num_cached: int = 0, name: str = "b"
) -> Any:  # noqa: ANN401
    req = ReqMeta(name, 0, tables, hashes, can_save=False, load_spec=LoadSpec(num_cached, num_tokens, can_load=True))
    return connector_module("metadata").StepOrders(loads=[req])


HASHES: Final = [bytes([index, 2 * index]) * 16 for index in range(1, 7)]
SAVED: Final = [3, 9, 4, 11, 7, 20]
LOADED: Final = [30, 31, 32, 33, 34, 35]

ENGINES: Final[dict[str, tuple[list[Any], dict[str, Any]]]] = {
    "tp 1": ([full_spec], {}),
    "tp 2": ([full_spec], {"tp": 2}),
    "tp 4": ([full_spec], {"tp": 4}),
    "pp 2": ([full_spec], {"pp": 2}),
    "tp 2, pp 2": ([full_spec], {"tp": 2, "pp": 2}),
    "2 heads on 4 ranks": ([full_spec], {"tp": 4, "num_kv_heads": 2}),
    "1 head on 4 ranks": ([full_spec], {"tp": 4, "num_kv_heads": 1}),
    "MLA on 4 ranks": ([mla_spec], {"tp": 4, "num_kv_heads": 1}),
    "MLA on 2 ranks, pp 2": ([mla_spec], {"tp": 2, "pp": 2}),
    "full and sliding on 2 ranks": ([full_spec, lambda: sliding_spec(33)], {"tp": 2}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_all_ranks_together_save_each_chunk_once_and_load_their_own_bytes(name: str) -> None:
    specs, sizes = ENGINES[name]
    engine = Engine(*(spec() for spec in specs), **sizes)
    num_groups, num_ranks = len(specs), len(engine.ranks)
    # Groups share the tensors of all, and so never a block.
    saved = (SAVED, [40, 41, 42, 43, 44, 45])[:num_groups]
    loaded = (LOADED, [50, 51, 52, 53, 54, 55])[:num_groups]
    engine.compute(HASHES, saved)
    reports = engine.run(save_order(HASHES, saved))
    assert [(report.ended_saves, report.incomplete_saves) for report in reports] == [({0: 1}, set())] * num_ranks

    prefixes = [len(prefixes) for prefixes, _ in engine.ranks[0].pool._keys.lookup_groups()]
    assert len(engine.objects.keys()) == 6 * sum(prefixes)
    saves = [rank.pool.metrics().counts["saved_keys"] for rank in engine.ranks]
    assert sum(saves) == 6 * sum(prefixes)
    assert max(saves) - min(saves) <= num_groups  # shared evenly

    assert engine.ranks[-1].pool.lookup(97, HASHES) == 96
    engine.wipe()
    reports = engine.run(load_order(HASHES, loaded, 96))
    assert reports == [None] * num_ranks
    for rank in engine.ranks:
        assert rank.worker.take_loaded() == ({"b"}, set())
        assert rank.worker.take_failed_block_ids() == set()
        for group, table in enumerate(loaded):
            needed = [0, 1, 2, 3, 4, 5] if group == 0 else [4, 5]
            assert [chunk for chunk in range(6) if rank.holds(HASHES[chunk], group, table[chunk])] == needed
    engine.close()


def test_only_what_is_new_is_asked_for(engine: Engine) -> None:
    (rank,) = engine.ranks
    engine.compute(HASHES, (SAVED,))
    engine.run(save_order(HASHES[:4], (SAVED,)))
    engine.run(save_order(HASHES, (SAVED,), job_id=1, num_saved=64))
    counts = rank.pool.metrics().counts
    assert (counts["saved_keys"], counts["present_keys"]) == (6, 0)


def test_what_could_not_be_saved_is_reported_and_tried_again(engine: Engine) -> None:
    (rank,) = engine.ranks
    engine.compute(HASHES, (SAVED,))
    with rank.store.faults.active(Fault(call="put", indices={2}, code=-800)):
        (report,) = engine.run(save_order(HASHES, (SAVED,), job_id=5))
    assert (report.ended_saves, report.incomplete_saves) == ({5: 1}, {5})
    (report,) = engine.run(save_order(HASHES, (SAVED,), job_id=6))
    assert (report.ended_saves, report.incomplete_saves) == ({6: 1}, set())
    assert len(engine.objects.keys()) == 6


def test_a_save_that_cannot_even_start_is_reported(engine: Engine) -> None:
    """Or its blocks would be held for ever."""
    engine.close()
    (report,) = engine.run(save_order(HASHES, (SAVED,), job_id=5))
    assert (report.ended_saves, report.incomplete_saves) == ({5: 1}, {5})


def test_a_save_whose_request_contradicts_itself_is_reported(engine: Engine) -> None:
    (report,) = engine.run(save_order(HASHES, (SAVED[:2],), job_id=5))
    assert (report.ended_saves, report.incomplete_saves) == ({5: 1}, {5})


def test_a_running_save_is_not_reported(engine: Engine) -> None:
    (rank,) = engine.ranks
    engine.compute(HASHES, (SAVED,))
    gate = Gate()
    with rank.store.faults.active(Fault(call="put", before=gate.hold)):
        rank.worker.start_saves(save_order(HASHES, (SAVED,), job_id=5))
        gate.wait_until_reached()
        assert (rank.worker.take_report(), rank.worker.num_jobs) == (None, 1)
        gate.open()
        report = engine.settle(rank)
    assert report.ended_saves == {5: 1}


def test_a_reset_gives_up_saves_that_wait(engine: Engine) -> None:
    (rank,) = engine.ranks
    engine.compute(HASHES, (SAVED,))
    gate = Gate()
    with rank.store.faults.active(Fault(call="put", before=gate.hold)):
        rank.worker.start_saves(save_order(HASHES[:1], (SAVED,), job_id=1))
        gate.wait_until_reached()
        rank.worker.start_saves(save_order(HASHES[1:], (SAVED[1:],), job_id=2))
        rank.worker.start_saves(connector_module("metadata").StepOrders(drops_saves=True))
        report = rank.worker.take_report()
        assert (report.ended_saves, report.incomplete_saves) == ({2: 1}, {2})
        gate.open()
        engine.settle(rank)
    assert len(engine.objects.keys()) == 1


# Loads that fail


def _without(engine: Engine, chunk: int) -> None:
    """Removes the last rank's part of a chunk."""
    key = next(key for key in sorted(engine.objects.keys(), reverse=True) if key.endswith(HASHES[chunk].hex()))
    assert engine.objects.drop([key]) == 1


def test_of_one_group_the_blocks_that_failed_are_told(engine: Engine) -> None:
    engine.compute(HASHES, (SAVED,))
    engine.run(save_order(HASHES, (SAVED,)))
    _without(engine, 3)
    (report,) = engine.run(load_order(HASHES, (LOADED,), 96))
    (rank,) = engine.ranks
    assert report.failed_loads == {"b"}
    assert rank.worker.take_loaded() == ({"b"}, set())
    failed = rank.worker.take_failed_block_ids()
    assert 33 in failed
    assert failed <= {33, 34, 35}
    for chunk, block_id in enumerate(LOADED):
        assert block_id in failed or rank.holds(HASHES[chunk], 0, block_id)
    assert rank.worker.take_failed_block_ids() == set()


@pytest.mark.parametrize("specs", [[full_spec, lambda: sliding_spec(33)], [lambda: sliding_spec(33)]])
def test_of_several_groups_or_a_window_alone_the_whole_request_fails(specs: list[Any]) -> None:
    """Blocks have one number in several groups, and before a window there is nothing to go back to."""
    engine = Engine(*(spec() for spec in specs))
    (rank,) = engine.ranks
    saved = tuple([10 * (group + 1) + i for i in range(6)] for group in range(len(specs)))
    engine.compute(HASHES, saved)
    engine.run(save_order(HASHES, saved))
    _without(engine, 5)
    (report,) = engine.run(load_order(HASHES, saved, 96))
    assert report.failed_loads == {"b"}
    assert rank.worker.take_loaded() == ({"b"}, {"b"})
    assert rank.worker.take_failed_block_ids() == set()
    engine.close()


@pytest.mark.parametrize("error", [StoreError("closed"), OSError("no network"), None])
def test_a_load_that_raises_fails_all_its_blocks(engine: Engine, error: Exception | None) -> None:
    (rank,) = engine.ranks
    if error is None:
        engine.close()
        (report,) = engine.run(load_order(HASHES, (LOADED,), 96, 32))
    else:
        with rank.store.faults.active(Fault(call="get", times=None, error=error)):
            (report,) = engine.run(load_order(HASHES, (LOADED,), 96, 32))
    assert report.failed_loads == {"b"}
    assert rank.worker.take_loaded() == ({"b"}, set())
    assert rank.worker.take_failed_block_ids() == {32, 33, 34, 35}


def test_a_load_within_the_step_is_done_when_it_returns() -> None:
    engine = Engine(full_spec(), load_async=False)
    (rank,) = engine.ranks
    engine.compute(HASHES, (SAVED,))
    engine.run(save_order(HASHES, (SAVED,)))
    engine.wipe()
    rank.worker.start_loads(load_order(HASHES, (LOADED,), 96))
    assert all(rank.holds(chunk_hash, 0, block_id) for chunk_hash, block_id in zip(HASHES, LOADED, strict=True))
    assert rank.worker.take_loaded() == (set(), set())  # vLLM waits for none
    engine.close()


# Events


def test_events_are_those_of_vllms_connector() -> None:
    engine = Engine(full_spec(), sliding_spec(33), has_events=True)
    request = make_request("a", 97)
    hashes, tables = request.block_hashes, ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16])
    engine.compute(hashes, tables)
    engine.run(save_order(hashes, tables, token_ids=list(request.all_token_ids)))
    events = engine.ranks[0].worker.take_events()
    stored = import_vllm("distributed.kv_events").BlockStored
    convert = import_vllm("v1.core.kv_cache_utils").maybe_convert_block_hash
    expected = [
        stored(
            block_hashes=[convert(hashes[chunk])],
            parent_block_hash=convert(hashes[chunk - 1]) if chunk else None,
            token_ids=list(request.all_token_ids[16 * chunk : 16 * chunk + 16]),
            block_size=16,
            lora_id=None,
            medium="cpu",
            lora_name=None,
            group_idx=group,
        )
        for chunk in range(6)
        for group in range(2)
    ]
    assert sorted(events, key=repr) == sorted(expected, key=repr)
    engine.run(save_order(hashes, tables, job_id=1, token_ids=list(request.all_token_ids)))
    assert engine.ranks[0].worker.take_events() == []  # all there
    engine.close()


def test_an_event_is_passed_on_when_every_rank_has_told_it() -> None:
    events_module = connector_module("events")
    stored = import_vllm("distributed.kv_events").BlockStored

    def event(group: int) -> Any:  # noqa: ANN401
        return stored([b"h"], None, [], 16, None, "cpu", None, group_idx=group)

    events = events_module.StoredEvents([1, 4], num_ranks=4)
    events.add_events([event(0), event(1)])
    assert events.pop_common() == [event(1)]  # four ranks hold the same bytes, one saves them
    events.add_events([event(0), event(0)])
    assert events.pop_common() == []
    events.add_events([event(0)])
    assert events.pop_common() == [event(0)]
    assert events.pop_common() == []


def test_events_that_nobody_else_tells_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    events_module = connector_module("events")
    monkeypatch.setattr(events_module, "MAX_PENDING", 3)
    stored = import_vllm("distributed.kv_events").BlockStored
    events = events_module.StoredEvents([1], num_ranks=2)
    for index in range(5):
        events.add_events([stored([bytes([index])], None, [], 16, None, "cpu", None, group_idx=0)])
    assert [event.block_hashes for event in events.get_all_events()] == [[b"\x02"], [b"\x03"], [b"\x04"]]
