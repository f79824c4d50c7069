"""Where the bytes of chunks lie: arithmetic over the whole of unsigned 64 bits, and lists that are the caller's own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given

import mooncrate.data
import reference
from cases import STRATEGIES, AddressCase, BlockCase
from mooncrate.data import ChunkedTokenDatabase, KeyMetadata
from mooncrate.errors import AddressOverflowError, LayoutError
from outcome import exactly

END = 2**64


def database(
    base_addrs: Sequence[int], block_len: Sequence[int], block_size: int = 16, hash_block_size: int | None = None
) -> ChunkedTokenDatabase:
    made = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), block_size, hash_block_size)
    made.set_kv_caches_base_addr(list(base_addrs))
    made.set_block_len(list(block_len))
    return made


@given(STRATEGIES["addresses"])
def test_rows_agree_with_the_twin(case: AddressCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@given(STRATEGIES["block"])
def test_blocks_agree_with_the_twin(case: BlockCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


# The ends of 64 bits


@pytest.mark.parametrize("base", [2**63 - 8_192, 2**63 - 4_096, 2**63, 2**63 + 1, END - 3 * 4_096])
def test_addresses_above_the_signed_range(base: int) -> None:
    made = database([base], [4_096])
    assert made.prepare_values([(0, 16), (16, 32)], [2, 1]) == (
        [[base + 8_192], [base + 4_096]],
        [[4_096], [4_096]],
        [2, 1],
    )
    assert made.prepare_value(0, 16, [2]) == ([base + 8_192], [4_096], 2)
    assert made.prepare_value_for_block(2) == ([base + 8_192], [4_096])


@pytest.mark.parametrize(
    ("base", "length", "block_id"),
    [
        (END - 1, 1, 0),
        (END - 1, 0, 2**63 - 1),
        (0, END - 1, 0),
        (1, END - 1, 0),
        (0, 2**63, 1),
        (0, 2**32, 2**32 - 1),
        (END - 4_096, 4_096, 0),
        (END - 8_192, 4_096, 1),
        (0, 1, 2**63 - 1),
        (2**63, 1, 2**63 - 1),
    ],
)
def test_the_last_byte_may_be_the_last_one_there_is(base: int, length: int, block_id: int) -> None:
    made = database([base], [length])
    expected = [base + block_id * length], [length]
    assert made.prepare_value_for_block(block_id) == expected
    assert made.prepare_value(0, 16, [block_id]) == (*expected, block_id)
    beyond = END - block_id * length - length + 1
    if base > 0 and length and beyond < END:
        over = database([beyond], [length])
        with pytest.raises(AddressOverflowError, match=rf"^block {block_id} of region 0 .* {length} bytes\) ends past"):
            over.prepare_value_for_block(block_id)
        with pytest.raises(AddressOverflowError):
            over.prepare_values([(0, 16)], [block_id])


def test_a_chunk_over_several_blocks() -> None:
    made = database([1_000, 9_000], [10, 7], block_size=32, hash_block_size=16)
    addrs, sizes, block_ids = made.prepare_values([(0, 0), (0, 16), (0, 32), (0, 48), (32, 96), (48, 112)], [5, 6])
    assert addrs == [[1_050, 9_035]] * 4 + [[1_060, 9_042]] * 2
    assert sizes == [[0, 0], [10, 7], [10, 7], [20, 14], [20, 14], [20, 14]]
    assert block_ids == [5, 5, 5, 5, 6, 6]
    with pytest.raises(AddressOverflowError, match=r"4 blocks of 4611686018427387904 bytes do not fit 64 bits"):
        database([0], [2**62]).prepare_values([(0, 64)], [0])


# Block lengths


@pytest.mark.parametrize("num_lengths", [1, 2, 3, 4, 5, 9])
def test_lengths_repeat_over_the_regions(num_lengths: int) -> None:
    base_addrs = [10_000 * region for region in range(4)]
    block_len = [100 + place for place in range(num_lengths)]
    repeated = [block_len[region % num_lengths] for region in range(4)]
    addrs, sizes, _ = database(base_addrs, block_len).prepare_values([(0, 16)], [3])
    assert sizes == [repeated]
    assert addrs == [[base + 3 * length for base, length in zip(base_addrs, repeated, strict=True)]]


def test_lengths_can_come_after_and_change() -> None:
    made = database([4_096], [10])
    assert made.prepare_value_for_block(2) == ([4_116], [10])
    made.set_block_len([20])
    assert made.prepare_value_for_block(2) == ([4_136], [20])
    made.set_kv_caches_base_addr([0, 8_192])
    assert made.prepare_value_for_block(2) == ([40, 8_232], [20, 20])


def test_regions_without_a_length() -> None:
    for num_regions in (1, 3):
        made = database([4_096] * num_regions, [])
        message = f"^block_len is empty but there are {num_regions} regions$"
        for call in cast(
            list[Callable[[], object]],
            [lambda made=made: made.prepare_values([(0, 16)], [0]), lambda made=made: made.prepare_value_for_block(0)],
        ):
            with pytest.raises(LayoutError, match=message):
                call()
        assert made.prepare_values([], [0]) == ([], [], [])


def test_no_regions() -> None:
    for block_len in ([], [64]):
        made = database([], block_len)
        assert made.prepare_values([(0, 16), (16, 32)], [4, 7]) == ([[], []], [[], []], [4, 7])
        assert made.prepare_value_for_block(4) == ([], [])


def test_what_was_set_is_a_snapshot() -> None:
    base_addrs, block_len = [4_096], [10]
    made = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    assert (made.kv_caches_base_addr, made.block_len) == ([], [])
    made.set_kv_caches_base_addr(base_addrs)
    made.set_block_len(block_len)
    base_addrs.append(1)
    block_len[0] = 77
    assert (made.kv_caches_base_addr, made.block_len) == ([4_096], [10])
    made.kv_caches_base_addr.append(5)
    assert made.prepare_value_for_block(1) == ([4_106], [10])
    made.kv_caches_base_addr, made.block_len = [1], [2]
    assert made.prepare_value_for_block(1) == ([3], [2])


# Results


@pytest.mark.parametrize(
    ("chunks", "block_ids"),
    [
        ([(0, 16), (16, 32)], [3, 1]),
        (((0, 16), (16, 32)), (3, 1)),
        ([[0, 16], [16, 32]], [3, 1]),
        ([(0, 16, b"hash"), (16, 32, b"hash")], [3, 1]),
        ([(np.int64(0), np.int32(16)), (np.uint64(16), np.int64(32))], np.array([3, 1])),
        ([(False, 16), (16, 32)], np.array([3, 1], dtype=np.uint16)),
        (list(np.array([[0, 16], [16, 32]])), {0: 3, 1: 1}),
        ([(0, 16), (16, 32)], [np.int64(3), True]),
    ],
)
def test_results_are_lists_of_lists_of_int(chunks: Any, block_ids: Any) -> None:  # noqa: ANN401 - many types
    found = database([1_000, 2_000], [10]).prepare_values(chunks, block_ids)
    assert exactly(found) == exactly(([[1_030, 2_030], [1_010, 2_010]], [[10, 10], [10, 10]], [3, 1]))


def test_results_of_one_chunk_and_one_block() -> None:
    made = database(cast(Any, np.array([1_000, 2_000])), cast(Any, np.array([10])))
    expected = [1_030, 2_030], [10, 10]
    assert exactly(made.prepare_value(0, 16, cast(Any, np.array([3])))) == exactly((*expected, 3))
    assert exactly(made.prepare_value_for_block(cast(Any, np.int64(3)))) == exactly(expected)
    assert exactly(made.prepare_values([], [])) == exactly(([], [], []))


def test_rows_are_lists_of_their_own() -> None:
    made = database([1_000, 2_000], [10])
    chunks, block_ids = [(0, 16), (16, 32), (32, 48)], [3, 3, 3]
    addrs, sizes, _ = made.prepare_values(chunks, block_ids)
    addrs[0][0] = sizes[0][0] = -1
    addrs[0].clear()
    sizes[0].append(7)
    assert addrs[1:] == [[1_030, 2_030]] * 2
    assert sizes[1:] == [[10, 10]] * 2
    assert made.prepare_values(chunks, block_ids)[:2] == ([[1_030, 2_030]] * 3, [[10, 10]] * 3)
    row = made.prepare_value_for_block(3)
    row[0].clear()
    row[1].clear()
    assert made.prepare_value_for_block(3) == ([1_030, 2_030], [10, 10])


def test_many_rows() -> None:
    base_addrs = [region * 2**40 for region in range(64)]
    num_chunks = 2_000
    chunks = [(index * 16, index * 16 + 16) for index in range(num_chunks)]
    block_ids = [(index * 251) % num_chunks for index in range(num_chunks)]
    found = database(base_addrs, [8_192]).prepare_values(chunks, block_ids)
    assert found == (
        [[base + block_id * 8_192 for base in base_addrs] for block_id in block_ids],
        [[8_192] * 64] * num_chunks,
        block_ids,
    )


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("end", [16, 15, -16, 999])
def test_garbage_collection_is_as_it_was(is_enabled: bool, end: int) -> None:
    was_enabled, threshold = gc.isenabled(), gc.get_threshold()
    try:
        (gc.enable if is_enabled else gc.disable)()
        try:
            database([1_000], [10]).prepare_values([(0, 16), (end - 16, end)] * 1_000, [3])
        except (AssertionError, LayoutError, IndexError):
            assert end != 16
        assert (gc.isenabled(), gc.get_threshold()) == (is_enabled, threshold)
    finally:
        (gc.enable if was_enabled else gc.disable)()


# Errors


@pytest.mark.parametrize(
    ("chunk", "block_ids", "error", "message"),
    [
        ((0, 15), [0], AssertionError, "chunk 0..15 does not hold a whole number of 16-token hash blocks"),
        ((-3, 8), [0], AssertionError, "chunk -3..8 does not hold a whole number of 16-token hash blocks"),
        ((-16, 0), [0], LayoutError, "chunk -16..0 is not a range of tokens of the request"),
        ((32, 16), [0, 1, 2], LayoutError, "chunk 32..16 is not a range of tokens of the request"),
        ((0, 16), [], IndexError, "chunk 0..16 needs block 0 of a table of 0"),
        ((32, 48), (7, 8), IndexError, "chunk 32..48 needs block 2 of a table of 2"),
        ((0, 16), [-1], LayoutError, "block id -1 is negative"),
        ((0, 16), np.array([-5]), LayoutError, "block id -5 is negative"),
        ((0, 16), [2**63], AddressOverflowError, "block id 9223372036854775808 is not in -2**63..2**63"),
        ((2**63, 0), [0], AddressOverflowError, "chunk start 9223372036854775808 is not in -2**63..2**63"),
        ((0, 2**64), [0], AddressOverflowError, "chunk end 18446744073709551616 is not in -2**63..2**63"),
        (
            (0, 16),
            [2**62],
            AddressOverflowError,
            (
                "block 4611686018427387904 of region 1 (base 0x7fffffffffffffff, stride 4, 4 bytes) ends past the "
                "last 64-bit address"
            ),
        ),
    ],
)
def test_errors_carry_their_numbers(
    chunk: tuple[int, int],
    block_ids: Any,  # noqa: ANN401 - any table
    error: type[Exception],
    message: str,
) -> None:
    made = database([0, 2**63 - 1], [2, 4])
    with pytest.raises(error) as caught:
        made.prepare_values([chunk], block_ids)
    assert str(caught.value) == message
    with pytest.raises(error) as caught:
        made.prepare_values([(0, 0), chunk], [*block_ids] or [])
    if error is not IndexError:
        with pytest.raises(error):
            made.prepare_value(*chunk, block_ids)


@pytest.mark.parametrize("number", [-1, -(2**63), END, 2**70])
def test_memory_outside_unsigned_64_bits(number: int) -> None:
    for made, name in [(database([number], [1]), "base address"), (database([0], [number]), "block_len")]:
        with pytest.raises(AddressOverflowError) as caught:
            made.prepare_values([(0, 16)], [0])
        assert str(caught.value) == f"{name} {number} is not in 0..2**64"
        with pytest.raises(AddressOverflowError):
            made.prepare_value_for_block(0)


def test_errors_of_one_block() -> None:
    made = database([0], [16])
    for block_id, error, message in [
        (-1, LayoutError, "block id -1 is negative"),
        (2**63, AddressOverflowError, "block id 9223372036854775808 is not in"),
        (2**62, AddressOverflowError, "block 4611686018427387904 of region 0"),
        (1.5, TypeError, "float"),
        ("1", TypeError, "str"),
    ]:
        with pytest.raises(error, match=message):
            made.prepare_value_for_block(cast(int, block_id))


@pytest.mark.parametrize(
    ("chunks", "block_ids"),
    [
        ([(0.0, 16)], [1]),
        ([(0, "16")], [1]),
        ([None], [1]),
        ([5], [1]),
        ([(0, 16)], [1.5]),
        ([(0, 16)], None),
        (5, [1]),
    ],
)
def test_other_types_are_refused(chunks: Any, block_ids: Any) -> None:  # noqa: ANN401 - the wrong ones
    with pytest.raises(TypeError):
        database([0], [16]).prepare_values(chunks, block_ids)


def test_a_chunk_without_an_end() -> None:
    with pytest.raises(IndexError):
        database([0], [16]).prepare_values([(0,)], [1])  # type: ignore[list-item]
