"""Chunks of a request: which ones, in what order, and that no other hash is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncrate.data
import reference
from cases import STRATEGIES, ChunksCase, GridCase, RecordingHashes, made_up_hashes, new_database
from mooncrate.data import BlobBlockHashes, ChunkedTokenDatabase, KeyMetadata
from mooncrate.errors import AddressOverflowError, LayoutError


def database(block_size: int = 16, hash_block_size: int | None = None) -> ChunkedTokenDatabase:
    return ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), block_size, hash_block_size)


@given(STRATEGIES["chunks"])
def test_chunks_agree_with_the_twin(case: ChunksCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@given(STRATEGIES["grid"])
def test_sizes_agree_with_the_twin(case: GridCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


def spans(
    token_len: int,
    block_size: int = 32,
    hash_block_size: int = 16,
    **options: Any,  # noqa: ANN401 - those of process_tokens
) -> list[tuple[int, int, int]]:
    """Chunks with the index of their hash."""
    hashes = made_up_hashes(40)
    chunks = database(block_size, hash_block_size).process_tokens(token_len, hashes, **options)
    return [(start, end, hashes.index(cast(bytes, chunk_hash))) for start, end, chunk_hash in chunks]


@pytest.mark.parametrize(
    ("token_len", "expected"),
    [
        (-16, []),
        (0, []),
        (16, [(0, 16, 0)]),
        (32, [(0, 32, 1)]),
        (48, [(0, 32, 1), (32, 48, 2)]),
        (64, [(0, 32, 1), (32, 64, 3)]),
        (80, [(0, 32, 1), (32, 64, 3), (64, 80, 4)]),
    ],
)
def test_boundaries_of_token_len(token_len: int, expected: list[tuple[int, int, int]]) -> None:
    assert spans(token_len) == expected


@pytest.mark.parametrize(
    ("mask_num", "first"),
    [(-(2**63), 0), (-1, 0), (0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (80, 3), (2**63 - 1, 3)],
)
def test_mask_num_rounds_up(mask_num: int, first: int) -> None:
    assert spans(80, mask_num=mask_num) == spans(80)[first:]


@pytest.mark.parametrize("put_step", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("mask_num", [0, 1, 64])
def test_all_ranks_together_take_every_chunk_once(put_step: int, num_chunks: int, mask_num: int) -> None:
    of_rank = [
        spans(num_chunks * 32, mask_num=mask_num, put_step=put_step, put_step_rank=rank) for rank in range(put_step)
    ]
    assert sorted(chunk for chunks in of_rank for chunk in chunks) == spans(num_chunks * 32, mask_num=mask_num)
    for rank, chunks in enumerate(of_rank):
        assert [start // 32 % put_step for start, _, _ in chunks] == [rank] * len(chunks)


@pytest.mark.parametrize(
    ("chunk_mask", "chunk_ids"),
    [
        ([], []),
        ([True], [1]),
        ([False], []),
        ([False, True], [2]),
        ([True, True], [1, 2]),
        ([True] * 9, [1, 2]),
        ([1, 0], [1]),
        (["", "yes"], [2]),
        ([None, [0]], [2]),
        ((True, False), [1]),
        (np.array([False, True]), [2]),
        (np.array([2, 0, 0]), [1]),
        (b"\x00\x01", [2]),
    ],
)
def test_a_mask_begins_at_the_first_chunk_after_mask_num(chunk_mask: Sequence[bool], chunk_ids: list[int]) -> None:
    assert spans(80, mask_num=17, chunk_mask=chunk_mask) == [spans(80)[chunk_id] for chunk_id in chunk_ids]


def test_items_are_tuples_of_integers_and_the_hash_itself() -> None:
    hashes = made_up_hashes(2)
    for numbers in [(32, 0, 1, 0), (np.int64(32), np.int8(0), np.uint64(1), False)]:
        token_len, mask_num, put_step, put_step_rank = cast(tuple[int, int, int, int], numbers)
        chunks = database().process_tokens(token_len, hashes, mask_num, put_step=put_step, put_step_rank=put_step_rank)
        for item in chunks:
            assert type(item) is tuple
            assert [type(part) for part in item] == [int, int, bytes]
            assert item[2] is hashes[item[0] // 16]
    blob = BlobBlockHashes(b"".join(hashes), 8)
    assert [type(chunk_hash) for _, _, chunk_hash in database().process_tokens(32, blob)] == [memoryview] * 2


# Laziness


class Untouchable:
    """Fails at whatever is done with it."""

    def __bool__(self) -> bool:
        raise RuntimeError("looked at")

    __len__ = __index__ = __getitem__ = __iter__ = __bool__


def test_nothing_is_looked_at_before_the_first_item() -> None:
    odd = cast(Any, Untouchable())
    chunks = database().process_tokens(odd, odd, odd, chunk_mask=odd, put_step=odd, put_step_rank=odd)
    assert iter(chunks) is chunks
    with pytest.raises(RuntimeError, match="looked at"):
        next(chunks)
    for arguments in [
        {"token_len": 15},
        {"token_len": 999},
        {"put_step": 0},
        {"put_step_rank": 1},
        {"mask_num": 2**70},
    ]:
        call = {"token_len": 16, "block_hashes": [b""], **arguments}
        chunks = cast(Any, database()).process_tokens(**call)
        with pytest.raises((AssertionError, LayoutError, AddressOverflowError)):
            next(chunks)


def test_only_hashes_that_are_yielded_are_touched() -> None:
    hashes = RecordingHashes(made_up_hashes(12))
    chunks = database(32, 16).process_tokens(
        192, hashes, 33, chunk_mask=[True, False, True, True], put_step=2, put_step_rank=1
    )
    assert hashes.touched == []
    assert [(start, end) for start, end, _ in chunks] == [(160, 192)]
    assert hashes.touched == [11]
    hashes.touched.clear()
    chunks = database(32, 16).process_tokens(192, hashes)
    next(chunks)
    assert hashes.touched == [1]
    next(chunks)
    assert hashes.touched == [1, 3]


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.booleans(), max_size=8), st.integers(0, 40))
def test_touched_hashes_are_the_yielded_ones(put_step: int, rank: int, mask: list[bool], mask_num: int) -> None:
    hashes = RecordingHashes(made_up_hashes(9))
    chunks = database(12, 4).process_tokens(
        36, hashes, mask_num, chunk_mask=mask, put_step=put_step, put_step_rank=rank % put_step
    )
    assert [end // 4 - 1 for _, end, _ in chunks] == hashes.touched


def test_a_mask_is_read_up_to_the_chunk_that_is_yielded() -> None:
    mask = RecordingHashes([cast(bytes, wanted) for wanted in (False, True, True, False)])
    chunks = database().process_tokens(64, made_up_hashes(4), chunk_mask=cast(Any, mask))
    next(chunks)
    assert mask.touched == [0, 1]
    assert sum(1 for _ in chunks) == 1
    assert mask.touched == [0, 1, 2, 3]


def test_without_hashes_nothing_else_counts() -> None:
    nothings: list[Any] = [[], (), b"", None, BlobBlockHashes(b"", 32)]
    for nothing in nothings:
        chunks = database().process_tokens(7, nothing, chunk_mask=cast(Any, 5))
        assert list(chunks) == []


# Ends


def test_the_end_is_final() -> None:
    chunks = database().process_tokens(32, made_up_hashes(2))
    assert len(list(chunks)) == 2
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(chunks)


class Failing(RecordingHashes):
    """Hashes one of which cannot be read."""

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        if index == 1:
            raise KeyError("hash 1 is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("api", [mooncrate.data, reference], ids=["mooncrate", "twin"])
def test_an_error_ends_the_iterator_for_good(api: Any) -> None:  # noqa: ANN401
    chunks = new_database(api).process_tokens(48, Failing(made_up_hashes(3)))
    assert next(chunks)[:2] == (0, 16)
    with pytest.raises(KeyError, match="hash 1 is gone"):
        next(chunks)
    assert list(chunks) == []
    chunks = new_database(api).process_tokens(48, made_up_hashes(3), chunk_mask=Failing(made_up_hashes(3)))
    next(chunks)
    with pytest.raises(KeyError):
        next(chunks)
    assert list(chunks) == []
    chunks = new_database(api).process_tokens(47, made_up_hashes(3))
    with pytest.raises(AssertionError):
        next(chunks)
    assert list(chunks) == []


def test_hashes_that_vanish_are_an_error() -> None:
    hashes = made_up_hashes(3)
    chunks = database().process_tokens(48, hashes)
    next(chunks)
    del hashes[1:]
    with pytest.raises(IndexError):
        next(chunks)
    assert list(chunks) == []


def test_hashes_that_ask_for_the_next_chunk_themselves() -> None:
    class Reentrant(RecordingHashes):
        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
            return next(chunks)

    chunks = database().process_tokens(32, Reentrant(made_up_hashes(2)))
    with pytest.raises(RuntimeError):
        next(chunks)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"put_step": 0}, AssertionError, "put_step (0) must be greater than 0"),
        ({"put_step": -3}, AssertionError, "put_step (-3) must be greater than 0"),
        ({"token_len": 31}, AssertionError, "token_len (31) is not a multiple of hash_block_size (16)"),
        ({"token_len": -1}, AssertionError, "token_len (-1) is not a multiple of hash_block_size (16)"),
        ({"token_len": 48}, AssertionError, "token_len (48) needs 3 block hashes of 16 tokens, got 2"),
        ({"put_step": 2, "put_step_rank": 2}, LayoutError, "put_step_rank (2) is not in 0..2"),
        ({"put_step_rank": -1}, LayoutError, "put_step_rank (-1) is not in 0..1"),
        ({"token_len": 2**63}, AddressOverflowError, "token_len 9223372036854775808 is not in -2**63..2**63"),
        ({"mask_num": -(2**70)}, AddressOverflowError, "mask_num -1180591620717411303424 is not in -2**63..2**63"),
        ({"put_step": 2**63}, AddressOverflowError, "put_step 9223372036854775808 is not in -2**63..2**63"),
        ({"put_step_rank": 2**63}, AddressOverflowError, "put_step_rank 9223372036854775808 is not in -2**63..2**63"),
    ],
)
def test_errors_carry_their_numbers(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    call = {"token_len": 32, "block_hashes": made_up_hashes(2), **arguments}
    with pytest.raises(error) as caught:
        list(cast(Any, database()).process_tokens(**call))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("block_size", "hash_block_size", "message"),
    [
        (0, None, "0 is not a block_size: at least 1 is needed"),
        (-16, None, "-16 is not a block_size: at least 1 is needed"),
        (16, -16, "-16 is not a hash_block_size: at least 1 is needed"),
        (24, 16, "block_size (24) must be a multiple of hash_block_size (16)"),
        (16, 32, "block_size (16) must be a multiple of hash_block_size (32)"),
    ],
)
def test_sizes_that_do_not_fit(block_size: int, hash_block_size: int | None, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        database(block_size, hash_block_size)
    assert str(caught.value) == message


def test_a_hash_block_is_a_block_unless_said_otherwise() -> None:
    for hash_block_size in (None, 0):
        assert (database(16, hash_block_size).block_size, database(16, hash_block_size).hash_block_size) == (16, 16)
    assert (database(32, 16).block_size, database(32, 16).hash_block_size) == (32, 16)
    for name in ("block_size", "hash_block_size"):
        with pytest.raises(AttributeError):
            setattr(database(), name, 32)
