"""Trackers and what is told of them: when a save is due, and that what was told does not change."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given

import mooncrate.data
import reference
from cases import STRATEGIES, RequestCase
from mooncrate.data import LoadSpec, MooncakeStoreConnectorMetadata, ReqMeta, RequestTracker


def tracker(token_len: int = 0, num_saved_tokens: int = 0) -> RequestTracker:
    return RequestTracker("r", token_len, ([1, 2], [3]), num_saved_tokens, [11, 12], prefill_end_tokens=40)


@given(STRATEGIES["request"])
def test_requests_agree_with_the_twin(case: RequestCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@pytest.mark.parametrize(
    ("token_len", "num_saved_tokens", "num_saved"),
    [
        (0, 0, None),
        (1, 0, None),
        (15, 0, None),
        (16, 0, 16),
        (17, 0, 16),
        (31, 16, None),
        (32, 16, 32),
        (32, 17, 32),
        (32, 31, 32),
        (32, 32, None),
        (47, 32, None),
        (48, 33, 48),
        (16, 48, None),
    ],
)
def test_a_save_is_due_when_a_new_block_is_full(token_len: int, num_saved_tokens: int, num_saved: int | None) -> None:
    one = tracker(token_len, num_saved_tokens)
    told = ReqMeta.from_request_tracker(one, 16)
    if num_saved is None:
        assert told is None
        assert one == tracker(token_len, num_saved_tokens)
        return
    assert told == ReqMeta(
        req_id="r",
        token_len_chunk=num_saved,
        block_ids=([1, 2], [3]),
        block_hashes=[],
        can_save=True,
        token_ids=[11, 12],
        num_prompt_tokens=40,
    )
    assert one == tracker(token_len, num_saved)
    assert ReqMeta.from_request_tracker(one, 16) is None, "the same block is not saved twice"


@pytest.mark.parametrize("skip_save", [None, False, True])
@pytest.mark.parametrize("can_load", [None, False, True])
@pytest.mark.parametrize("is_due", [False, True])
def test_every_combination(skip_save: bool | None, can_load: bool | None, is_due: bool) -> None:
    one = tracker(20 if is_due else 10)
    spec = None if can_load is None else LoadSpec(0, 16, can_load)
    told = ReqMeta.from_request_tracker(one, 16, spec, skip_save, [b"hash"], is_due)
    saves = is_due and not skip_save and not can_load
    assert one.num_saved_tokens == (16 if saves else 0)
    if not saves and spec is None:
        assert told is None
        return
    assert told is not None
    assert told.can_save is saves
    assert told.load_spec is (spec if can_load else None)
    assert not (told.can_save and told.load_spec)
    assert told.token_len_chunk == (16 if is_due else 0)
    assert told.is_last_chunk is is_due
    assert told.block_hashes == [b"hash"]


def test_what_was_told_does_not_change() -> None:
    one = tracker(16)
    told = ReqMeta.from_request_tracker(one, 16)
    assert told is not None
    before = replace(told, block_ids=([1, 2], [3]), token_ids=[11, 12])
    one.update(([4], [5]))
    assert one.token_ids is not None
    one.token_ids.append(13)
    one.token_len = 99
    assert told == before
    one.reset()
    assert told == before
    told.block_ids[0].append(77)
    assert one.allocated_block_ids == ()


def test_hashes_are_shared_with_the_request() -> None:
    hashes = [b"hash"]
    told = ReqMeta.from_request_tracker(tracker(16), 16, block_hashes=hashes)
    assert told is not None
    assert told.block_hashes is hashes
    other = ReqMeta.from_request_tracker(tracker(16), 16)
    another = ReqMeta.from_request_tracker(tracker(16), 16)
    assert other is not None
    assert another is not None
    assert other.block_hashes is not another.block_hashes


@pytest.mark.parametrize("token_ids", [None, []])
def test_no_tokens_are_none(token_ids: list[int] | None) -> None:
    told = ReqMeta.from_request_tracker(replace(tracker(16), token_ids=token_ids), 16)
    assert told is not None
    assert told.token_ids is None


def test_reset_keeps_the_name_alone() -> None:
    one = replace(tracker(32, 16), has_pending_offload=True)
    blocks = one.allocated_block_ids
    one.reset()
    assert one == RequestTracker("r", 0, ())
    assert blocks == ([1, 2], [3])


def test_update_appends_to_each_group() -> None:
    one = tracker()
    one.update(([4], []))
    one.update(([], [5, 6]))
    one.update(((), None))  # type: ignore[arg-type]
    assert one.allocated_block_ids == ([1, 2, 4], [3, 5, 6])
    alone = RequestTracker("r", 0, ([1],))
    alone.update([2, 3])
    alone.update([])
    assert alone.allocated_block_ids == ([1, 2, 3],)


@pytest.mark.parametrize("new_block_ids", [[4], ([4],), ([4], [5], [6]), ()])
def test_another_number_of_groups_is_refused(new_block_ids: tuple[list[int], ...] | list[int]) -> None:
    one = tracker()
    num_groups = 1 if isinstance(new_block_ids, list) else len(new_block_ids)
    with pytest.raises(ValueError, match=f"r has block tables for 2 KV cache groups, got new blocks for {num_groups}"):
        one.update(new_block_ids)
    assert one == tracker()


def test_metadata_of_a_step() -> None:
    unfinished, preempted = {"a", "b"}, {"b"}
    metadata = MooncakeStoreConnectorMetadata(unfinished, preempted)
    unfinished.clear()
    preempted.add("c")
    assert (metadata.unfinished_request_ids, metadata.preempted_req_ids) == ({"a", "b"}, {"b"})
    told = [ReqMeta(str(index), 0, (), []) for index in range(3)]
    for one in told:
        metadata.add_request(one)
    assert metadata.requests == told
    assert all(one is other for one, other in itertools.zip_longest(metadata.requests, told))
    assert MooncakeStoreConnectorMetadata(set(), set()).requests == []


def test_what_is_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mooncrate"):
        ReqMeta.from_request_tracker(tracker(16), 16, LoadSpec(0, 16, can_load=True))
    assert caplog.messages == [
        "request r: save None, load LoadSpec(vllm_cached_tokens=0, kvpool_cached_tokens=16, can_load=True, token_len=0)"
    ]


def test_a_numpy_length_decides_with_a_plain_bool() -> None:
    tracker = RequestTracker("r", cast(Any, np.int64(32)), ([1, 2],))
    meta = ReqMeta.from_request_tracker(tracker, 16)
    assert meta is not None
    assert type(meta.can_save) is bool
