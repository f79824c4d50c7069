"""The scheduler's side against vLLM's ``Request``, ``SchedulerOutput`` and ``BlockPool``, on a store in memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from connector_parts import (
    NUM_BLOCKS,
    Blocks,
    connector_module,
    full_spec,
    make_layout,
    make_request,
    make_step,
    open_pool,
    sliding_spec,
    vllm_config,
)
from mooncrate import KVPool
from mooncrate.errors import MooncrateError
from mooncrate.groups import RankTopology
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import MemoryStore
from mooncrate.store_faults import Fault, Gate

pytestmark = pytest.mark.vllm_version("0.32.0")

ALL_FREE: Final = NUM_BLOCKS - 1  # the null block is never free


@dataclass
class Side:
    """A scheduler's side and what surrounds it."""

    scheduler: Any
    layout: Any
    pool: KVPool
    store: MemoryStore
    objects: MemoryPool
    blocks: Blocks

    def put(self, request: Any, num_tokens: int) -> None:  # noqa: ANN401
        """Puts a prefix into the pool, as all ranks would have."""
        for prefixes, group in self.pool._keys.lookup_groups():
            scale = group.block_size // self.layout.hash_block_size
            for chunk in range(num_tokens // group.block_size):
                for prefix in prefixes:
                    chunk_hash = request.block_hashes[(chunk + 1) * scale - 1]
                    assert self.objects.put(f"{prefix}@{chunk_hash.hex()}", b"x") == 0

    def admit(self, request: Any, num_computed: int, num_external: int, num_tokens: int) -> None:  # noqa: ANN401
        """Gives a request blocks and tells the connector."""
        blocks = self.blocks.allocate(request.request_id, num_tokens)
        self.scheduler.allocate(request, blocks.get_block_ids(), num_external)
        request.num_computed_tokens = num_computed + num_external

    def report(self, job_id: int, num_ranks: int = 1, **more: object) -> None:
        """Reports a save."""
        metadata = connector_module("metadata")
        self.scheduler.note(metadata.StepReport(ended_saves={job_id: num_ranks}, **more))


def make_side(*specs: object, role: str = "kv_both", extra: dict[str, Any] | None = None, **sizes: int) -> Side:
    config: dict[str, Any] = {"role": role, "extra": extra, **sizes}
    layout = make_layout(*specs, **config)
    objects = MemoryPool()
    topology = connector_module("layout").topology_of(vllm_config(**config))
    store = MemoryStore(objects)
    pool = open_pool(layout, store, topology)
    settings = connector_module("settings").Settings.of(vllm_config(**config))
    scheduler = connector_module("scheduler").SchedulerSide(settings, layout, pool)
    blocks = Blocks(len(specs))
    scheduler.bind(blocks.pool)
    return Side(scheduler, layout, pool, store, objects, blocks)


@pytest.fixture
def side() -> Iterator[Side]:
    made = make_side(full_spec())
    yield made
    made.pool.close()


def answered(side: Side, request: Any, num_computed: int = 0) -> int:  # noqa: ANN401
    """Asks until there is an answer; the store in memory gives it at once."""
    side.scheduler._lookups._wait_left = 10.0
    answer = side.scheduler.num_new_tokens(request, num_computed)
    assert answer is not None
    return int(answer)


# Lookups


@pytest.mark.parametrize(("num_tokens", "num_stored", "hit"), [(64, 64, 48), (65, 64, 64), (100, 32, 32), (16, 16, 0)])
def test_a_hit_is_what_the_pool_has_below_the_last_token(
    side: Side, num_tokens: int, num_stored: int, hit: int
) -> None:
    request = make_request("a", num_tokens)
    side.put(request, num_stored)
    assert answered(side, request) == hit


@pytest.mark.parametrize(("num_computed", "more"), [(0, 64), (32, 32), (64, 0), (80, 0)])
def test_only_what_the_engine_does_not_have_is_loaded(side: Side, num_computed: int, more: int) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    assert answered(side, request, num_computed) == more


@pytest.mark.parametrize("config", [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 4, "num_kv_heads": 2}, {"tp": 2, "pp": 2}])
def test_a_chunk_counts_only_if_every_rank_has_its_part(config: dict[str, Any]) -> None:
    side = make_side(full_spec(), **config)
    request = make_request("a", 100)
    side.put(request, 64)
    assert answered(side, request) == 64
    side.scheduler.forget("a")
    (prefixes, _), *_ = side.pool._keys.lookup_groups()
    side.objects.drop([f"{prefixes[-1]}@{request.block_hashes[2].hex()}"])
    assert answered(side, request) == 32
    side.pool.close()


def test_a_step_does_not_wait_for_a_slow_store(side: Side) -> None:
    gate = Gate()
    requests = [make_request(f"r{index}", 100, seed=index) for index in range(64)]
    for request in requests:
        side.put(request, 64)
    with side.store.faults.active(Fault(call="exists", times=None, before=gate.hold)):
        side.scheduler._lookups._wait_left = 0.0
        assert [side.scheduler.num_new_tokens(request, 0) for request in requests] == [None] * 64
        gate.open()
        assert [answered(side, request) for request in requests] == [64] * 64


def test_all_lookups_of_a_step_share_one_short_wait(side: Side) -> None:
    gate = Gate()
    lookups = connector_module("lookup").PrefixLookups(side.pool, 5.0)
    with side.store.faults.active(Fault(call="exists", times=None, before=gate.hold)):
        assert lookups.num_hit_tokens(make_request("a", 100)) is None
        left = lookups._wait_left
        assert left <= 0  # the first has used it up
        for index in range(8):
            assert lookups.num_hit_tokens(make_request(f"b{index}", 100, seed=index + 1)) is None
        assert lookups._wait_left == left
        lookups.begin_step()
        assert lookups._wait_left > 0
        gate.open()


def test_an_answer_serves_a_request_that_cannot_be_scheduled_yet_for_a_while(side: Side) -> None:
    lookup = connector_module("lookup")
    now = [0.0]
    lookups = lookup.PrefixLookups(side.pool, 5.0, clock=lambda: now[0])
    lookups._wait_left = 10.0
    request = make_request("a", 100)
    assert lookups.num_hit_tokens(request) == 0
    side.put(request, 64)
    assert lookups.num_hit_tokens(request) == 0  # asked once
    now[0] = lookup.ANSWER_SECONDS + 0.001
    lookups._wait_left = 10.0
    assert lookups.num_hit_tokens(request) == 64


def test_a_lookup_that_fails_is_a_miss(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    with side.store.faults.active(Fault(call="exists", error=OSError("no network"))):
        assert answered(side, request) == 0
    side.pool.close()
    side.scheduler.forget("a")
    assert side.scheduler.num_new_tokens(request, 0) == 0


def test_nothing_is_asked_where_lookups_are_off_or_unwanted(side: Side) -> None:
    off = make_side(full_spec(), extra={"enable_lookup": False})
    request = make_request("a", 100)
    off.put(request, 64)
    assert off.scheduler.num_new_tokens(request, 0) == 0
    request.skip_reading_prefix_cache = True
    side.put(request, 64)
    assert side.scheduler.num_new_tokens(request, 0) == 0
    assert (off.pool.metrics().counts["lookups"], side.pool.metrics().counts["lookups"]) == (0, 0)
    off.pool.close()


# Loads


def test_a_load_is_ordered_once_and_names_blocks_and_hashes(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    assert answered(side, request, 16) == 48
    side.admit(request, 16, 48, 64)
    orders = side.scheduler.orders(make_step(side.blocks))
    (load,) = pickle.loads(pickle.dumps(orders)).loads
    assert (load.req_id, load.block_ids) == ("a", side.blocks.ids("a"))
    assert (load.load_spec.vllm_cached_tokens, load.load_spec.kvpool_cached_tokens) == (16, 64)
    assert load.block_hashes == request.block_hashes[:4]
    assert (orders.saves, orders.is_idle) == ([], True)
    assert side.scheduler.orders(make_step(side.blocks)).loads == []


def test_nothing_is_loaded_for_blocks_that_another_connector_fills(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    assert answered(side, request) == 64
    side.admit(request, 0, 0, 100)
    assert side.scheduler.orders(make_step(side.blocks)).loads == []


def test_what_was_loaded_is_not_saved_again(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    answered(side, request)
    side.admit(request, 0, 64, 64)
    side.scheduler.orders(make_step(side.blocks))
    side.admit(request, 64, 0, 100)
    (save,) = side.scheduler.orders(make_step(side.blocks, new={"a": (100, 64, 36)})).saves
    assert (save.num_saved_tokens, save.req.token_len_chunk) == (64, 96)


def test_a_request_whose_load_failed_is_computed_and_saved_whole(side: Side) -> None:
    """Asked again, a store that still believes in an object would be believed again, for as long as it does."""
    request = make_request("a", 100)
    side.put(request, 64)
    answered(side, request)
    side.admit(request, 0, 64, 64)
    side.scheduler.orders(make_step(side.blocks))
    side.scheduler.note(connector_module("metadata").StepReport(failed_loads={"a"}))
    assert side.scheduler.num_new_tokens(request, 0) == 0
    side.admit(request, 0, 0, 100)
    (save,) = side.scheduler.orders(make_step(side.blocks, new={"a": (100, 0, 100)})).saves
    assert (save.num_saved_tokens, save.req.token_len_chunk) == (0, 96)
    side.scheduler.forget("a")
    assert answered(side, make_request("a", 100)) == 64


# Saves


def prefill(side: Side, request: Any, num_computed: int, num_new: int) -> Any:  # noqa: ANN401
    """Runs one chunk of a prefill and returns its save, if there is one."""
    name = request.request_id
    if num_computed == 0:
        side.admit(request, 0, 0, num_new)
        step = make_step(side.blocks, new={name: (request.num_prompt_tokens, 0, num_new)})
    else:
        side.blocks.allocate(name, num_computed + num_new)
        step = make_step(side.blocks, cached={name: (num_computed, num_new)})
    orders = side.scheduler.orders(step)
    return orders.saves[0] if orders.saves else None


def test_a_chunked_prefill_is_saved_as_blocks_are_completed(side: Side) -> None:
    request = make_request("a", 100)
    saves = [prefill(side, request, start, 20) for start in range(0, 100, 20)]
    assert [save and save.req.token_len_chunk for save in saves] == [16, 32, 48, 80, 96]
    assert len({save.job_id for save in saves}) == 5
    assert saves[-1].req.block_ids == side.blocks.ids("a")
    assert saves[0].req.block_hashes == request.block_hashes[:1]


def test_a_save_begins_where_every_rank_has_completed_one() -> None:
    side = make_side(full_spec(), tp=2)
    request = make_request("a", 100)
    first = prefill(side, request, 0, 40)
    side.report(first.job_id)
    second = prefill(side, request, 40, 20)
    assert second.num_saved_tokens == 0  # one rank of two
    side.report(first.job_id)
    third = prefill(side, request, 60, 20)
    assert third.num_saved_tokens == 32
    side.report(second.job_id, 2, incomplete_saves={second.job_id})
    assert prefill(side, request, 80, 20).num_saved_tokens == 32
    side.pool.close()


@pytest.mark.parametrize(
    ("role", "save_decode_cache", "saved"),
    [
        ("kv_both", False, [96, None, None]),
        ("kv_both", True, [96, 112, 128]),
        ("kv_producer", False, [96, None, None]),
        ("kv_consumer", False, [None, None, None]),
        ("kv_consumer", True, [None, 112, 128]),
    ],
)
def test_what_each_role_saves(role: str, save_decode_cache: bool, saved: list[int | None]) -> None:
    side = make_side(full_spec(), role=role, extra={"save_decode_cache": save_decode_cache})
    request = make_request("a", 100)
    found = [prefill(side, request, 0, 100)]
    for num_computed in (100, 116):
        request.append_output_token_ids(list(range(16)))
        found.append(prefill(side, request, num_computed, 16))
    assert [save and save.req.token_len_chunk for save in found] == saved
    side.pool.close()


def test_drafts_that_may_be_refused_are_not_saved(side: Side) -> None:
    request = make_request("a", 31)
    side.admit(request, 0, 0, 40)
    step = make_step(side.blocks, new={"a": (31, 0, 40)})  # 9 of them drafts
    (save,) = side.scheduler.orders(step).saves
    assert save.req.token_len_chunk == 16


def test_blocks_live_until_every_rank_has_reported() -> None:
    side = make_side(full_spec(), tp=4, pp=2)
    request = make_request("a", 64)
    save = prefill(side, request, 0, 64)
    side.blocks.free("a")
    side.scheduler.forget("a")
    assert (side.blocks.num_free, side.scheduler.num_saves) == (ALL_FREE - 4, 1)
    side.report(save.job_id, 3)
    side.report(save.job_id, 4)
    assert side.blocks.num_free == ALL_FREE - 4
    side.report(save.job_id)
    assert (side.blocks.num_free, side.scheduler.num_saves, side.scheduler.num_referenced_blocks) == (ALL_FREE, 0, 0)
    side.pool.close()


def test_more_reports_than_ranks_are_an_error(side: Side) -> None:
    save = prefill(side, make_request("a", 64), 0, 64)
    with pytest.raises(MooncrateError, match=f"save {save.job_id} was reported by 1 ranks more than there are"):
        side.report(save.job_id, 2)


def test_only_blocks_that_are_read_are_kept(side: Side) -> None:
    request = make_request("a", 100)
    side.report(prefill(side, request, 0, 64).job_id)
    prefill(side, request, 64, 36)  # tokens 64 to 96, and 4 more
    assert side.scheduler.num_referenced_blocks == 2


def test_null_blocks_of_a_sliding_window_are_not_referenced() -> None:
    side = make_side(full_spec(), sliding_spec(33))
    request = make_request("a", 96)
    side.blocks.allocate("a", 96)
    side.blocks.pool.free_blocks(side.blocks.tables["a"][1][:2])
    side.blocks.tables["a"][1][:2] = [side.blocks.pool.null_block] * 2
    side.scheduler.allocate(request, (), 0)
    side.scheduler.orders(make_step(side.blocks, new={"a": (96, 0, 96)}))
    assert side.scheduler.num_referenced_blocks == 6 + 4
    side.pool.close()


# Preemption, resumption, abort, end


def test_a_resumed_request_is_not_touched_by_what_it_left_behind(side: Side) -> None:
    request = make_request("a", 100)
    old = prefill(side, request, 0, 64)
    side.blocks.free("a")
    request.num_preemptions += 1
    request.append_output_token_ids([1, 2, 3])
    side.scheduler.orders(make_step(side.blocks, preempted={"a"}))
    assert side.blocks.num_free == ALL_FREE - 4  # those that the old save reads

    side.admit(request, 0, 0, 103)
    step = make_step(side.blocks, cached={"a": (0, 103)}, resumed={"a"})
    (new,) = side.scheduler.orders(step).saves
    assert (new.num_saved_tokens, new.req.token_len_chunk, new.req.num_prompt_tokens) == (0, 96, 103)
    assert not set(new.req.block_ids[0]) & set(old.req.block_ids[0])
    side.report(old.job_id)  # says nothing of the new blocks
    side.blocks.allocate("a", 119)
    request.append_output_token_ids(list(range(16)))
    assert side.scheduler.num_saves == 1
    assert side.scheduler._entries["a"].num_pool_tokens == 0
    side.report(new.job_id)
    assert side.scheduler._entries["a"].num_pool_tokens == 96


def test_a_request_may_be_preempted_and_resumed_in_one_step(side: Side) -> None:
    """As after a reset of the prefix cache with running requests."""
    request = make_request("a", 100)
    prefill(side, request, 0, 64)
    side.blocks.free("a")
    request.num_preemptions += 1
    side.admit(request, 0, 0, 100)
    step = make_step(side.blocks, new={"a": (100, 0, 100)}, preempted={"a"})
    (save,) = side.scheduler.orders(step).saves
    assert save.req.token_len_chunk == 96


def test_a_preempted_request_may_be_loaded_again(side: Side) -> None:
    request = make_request("a", 100)
    prefill(side, request, 0, 64)
    side.blocks.free("a")
    request.num_preemptions += 1
    side.scheduler.orders(make_step(side.blocks, preempted={"a"}))
    side.put(request, 64)
    assert answered(side, request) == 64
    side.admit(request, 0, 64, 64)
    (load,) = side.scheduler.orders(make_step(side.blocks)).loads
    assert load.block_ids == side.blocks.ids("a")


def test_a_request_that_ends_leaves_nothing_but_its_saves(side: Side) -> None:
    request = make_request("a", 100)
    save = prefill(side, request, 0, 100)
    side.scheduler.forget("a")
    side.blocks.free("a")
    side.scheduler.orders(make_step(side.blocks, finished={"a"}))
    assert (side.scheduler.num_requests, side.scheduler.num_saves) == (0, 1)
    side.report(save.job_id)
    assert (side.scheduler.num_saves, side.blocks.num_free) == (0, ALL_FREE)


def test_a_name_may_come_back_in_the_step_that_says_it_ended(side: Side) -> None:
    prefill(side, make_request("a", 100), 0, 100)
    side.scheduler.forget("a")
    side.blocks.free("a")
    request = make_request("a", 80, seed=1)
    side.admit(request, 0, 0, 80)
    step = make_step(side.blocks, new={"a": (80, 0, 80)}, finished={"a"})
    (save,) = side.scheduler.orders(step).saves
    assert (save.req.token_len_chunk, save.req.block_hashes) == (80, request.block_hashes)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    answered(side, request)
    side.scheduler.forget("a")
    assert side.scheduler.num_requests == 0
    side.admit(request, 0, 0, 100)
    assert side.scheduler.orders(make_step(side.blocks)).loads == []


# Reset


def test_a_reset_removes_this_deployments_objects_and_no_others(side: Side) -> None:
    request = make_request("a", 100)
    side.put(request, 64)
    other = "other@tiny-model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@aa"
    side.objects.put(other, b"x")
    assert side.scheduler.reset() is True
    assert side.objects.keys() == [other]
    assert answered(side, request) == 0
    assert side.scheduler.orders(make_step(side.blocks)).drops_saves
    assert not side.scheduler.orders(make_step(side.blocks)).drops_saves


def test_what_saves_put_after_a_reset_goes_with_the_last_of_them(side: Side) -> None:
    request = make_request("a", 100)
    save = prefill(side, request, 0, 64)
    assert side.scheduler.reset() is True
    side.put(request, 64)  # by the save, which was running
    gate = Gate()
    with side.store.faults.active(Fault(call="remove", before=gate.hold)):
        side.report(save.job_id)
        gate.wait_until_reached()
        (thread,) = [one for one in threading.enumerate() if one.name == "mooncrate-reset"]
        gate.open()
        thread.join(10)
    assert side.objects.keys() == []
    assert side.scheduler._entries["a"].num_pool_tokens == 0


def test_a_reset_that_the_store_refuses_is_said(side: Side) -> None:
    side.objects.stop_master()
    assert side.scheduler.reset() is False


def test_ranks_of_a_scheduler_are_those_of_nobody() -> None:
    topology = connector_module("layout").topology_of(vllm_config(tp=4, pp=2))
    assert topology == RankTopology(tp_size=4, pp_size=2)
