"""Tensors to regions: the bytes that the regions of a block name are the bytes that indexing the block gives."""

import ctypes
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncrate.errors import AddressOverflowError, LayoutError, StoreError
from mooncrate.kv_caches import (
    KVLayout,
    Region,
    Registration,
    Storage,
    describe_kv_cache_groups,
    describe_kv_caches,
    register,
)
from mooncrate.store import GuardedStore, Store

PERIOD = 251
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.int64]


def pattern(num_bytes: int) -> torch.Tensor:
    """Returns bytes with a period that no power of two divides, so that swapped blocks show."""
    return (torch.arange(num_bytes) % PERIOD).to(torch.uint8)


def tensor_of(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a contiguous tensor of its own storage, filled with the pattern."""
    return pattern(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


def block_addrs(tensor: torch.Tensor, block_dim: int, block_id: int) -> list[int]:
    """Returns the address of every byte of a block, rising; found by indexing a tensor of element numbers alike."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    numbers = torch.arange(num_elements).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    starts = numbers.select(block_dim, block_id).flatten() * tensor.element_size()
    offsets = (starts[:, None] + torch.arange(tensor.element_size())).flatten().sort().values
    return [tensor.untyped_storage().data_ptr() + offset for offset in offsets.tolist()]


def region_addrs(regions: Sequence[Region], block_id: int) -> list[int]:
    """Returns the address of every byte of a block, in the order in which it is stored."""
    starts = [(base + block_id * stride, num_bytes) for base, stride, num_bytes in regions]
    return [addr for start, num_bytes in starts for addr in range(start, start + num_bytes)]


def gather(regions: Sequence[Region], block_id: int) -> bytes:
    """Reads a block as a store would."""
    parts = [(base + block_id * stride, num_bytes) for base, stride, num_bytes in regions]
    return b"".join(ctypes.string_at(addr, num_bytes) for addr, num_bytes in parts)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor's elements, in the order of its dimensions."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check_inside(regions: Sequence[Region], storages: Sequence[Storage], num_blocks: int) -> None:
    """Checks that no region leaves the registered memory, and that no two registrations share bytes."""
    for base, stride, num_bytes in regions:
        end = base + (num_blocks - 1) * stride + num_bytes
        assert any(storage.addr <= base and end <= storage.addr + storage.num_bytes for storage in storages)
    assert all(one.addr + one.num_bytes <= other.addr for one, other in pairwise(sorted(storages)))


def memory_of(layout: KVLayout) -> tuple[tuple[Region, ...], tuple[Storage, ...]]:
    return layout.regions, layout.storages


def offsets(layout: KVLayout, base: torch.Tensor) -> list[tuple[int, int, int]]:
    """Returns the regions relative to a tensor's storage."""
    start = base.untyped_storage().data_ptr()
    return [(region.base_addr - start, region.block_stride, region.block_bytes) for region in layout.regions]


# The layouts of the field


def test_a_view_per_layer() -> None:
    layers = {f"layer {index}": tensor_of((100, 2, 16, 4, 8)) for index in range(3)}
    layout = describe_kv_caches(layers, 100)
    assert layout.regions == tuple(Region(cache.data_ptr(), 4096, 4096) for cache in layers.values())
    assert layout.storages == tuple(Storage(cache.data_ptr(), 409_600) for cache in layers.values())
    assert gather(layout.regions, 77) == b"".join(bytes_of(cache[77]) for cache in layers.values())


def test_layers_keep_the_order_of_the_mapping_whatever_their_addresses() -> None:
    buffer = tensor_of((3, 100, 16, 8))
    layout = describe_kv_caches({"c": buffer[2], "a": buffer[0], "b": buffer[1]}, 100)
    assert offsets(layout, buffer) == [(102_400, 512, 512), (0, 512, 512), (51_200, 512, 512)]
    assert layout.storages == (Storage(buffer.data_ptr(), 153_600),)
    assert gather(layout.regions, 9) == bytes_of(buffer[2, 9]) + bytes_of(buffer[0, 9]) + bytes_of(buffer[1, 9])


def test_keys_and_values_in_one_tensor_are_two_regions() -> None:
    cache = tensor_of((2, 100, 16, 4, 8))
    layout = describe_kv_caches({"layer": cache}, 100)
    assert offsets(layout, cache) == [(0, 2048, 2048), (204_800, 2048, 2048)]
    assert gather(layout.regions, 3) == bytes_of(cache[0, 3]) + bytes_of(cache[1, 3])


def test_latent_cache_is_one_region() -> None:
    cache = tensor_of((100, 16, 576), torch.bfloat16)
    layout = describe_kv_caches({"layer": cache}, 100)
    assert offsets(layout, cache) == [(0, 18_432, 18_432)]
    assert gather(layout.regions, 50) == bytes_of(cache[50])


def test_permuted_inner_dimensions_of_a_dense_block_are_one_region() -> None:
    cache = tensor_of((100, 2, 4, 16, 8)).permute(0, 1, 3, 2, 4)
    assert offsets(describe_kv_caches({"layer": cache}, 100), cache) == [(0, 4096, 4096)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_head_major_blocks_are_one_region_per_head(order: tuple[int, ...]) -> None:
    cache = tensor_of((4, 100, 16, 8)).permute(order)
    layout = describe_kv_caches({"layer": cache}, 100)
    assert offsets(layout, cache) == [(head * 51_200, 512, 512) for head in range(4)]
    block = cache.select(cache.shape.index(100), 42)
    assert gather(layout.regions, 42) == b"".join(bytes_of(head) for head in block)


def test_a_view_packed_into_a_slot_moves_its_own_bytes_at_its_own_base() -> None:
    buffer = pattern(8192 + 7 * 10_000 + 8192)
    view = buffer.as_strided((8, 8192), (10_000, 1), 8192)
    layout = describe_kv_caches({"layer": view}, 8)
    assert offsets(layout, buffer) == [(8192, 10_000, 8192)]
    assert layout.storages == (Storage(buffer.data_ptr() + 8192, 7 * 10_000 + 8192),)
    assert gather(layout.regions, 7) == bytes_of(view[7])


def test_padding_is_not_moved() -> None:
    buffer = tensor_of((50, 10_000), torch.uint8)
    layout = describe_kv_caches({"layer": buffer[:, :8192]}, 50)
    assert offsets(layout, buffer) == [(0, 10_000, 8192)]
    assert layout.storages == (Storage(buffer.data_ptr(), 49 * 10_000 + 8192),)


def test_layers_packed_into_one_slot() -> None:
    buffer = tensor_of((50, 10_000), torch.uint8)
    layers = {"b": buffer[:, 8192:9500], "a": buffer[:, :8192], "c": buffer[:, 9600:9900]}
    layout = describe_kv_caches(layers, 50)
    assert offsets(layout, buffer) == [(0, 10_000, 9500), (9600, 10_000, 300)]
    assert layout.storages == (Storage(buffer.data_ptr(), 49 * 10_000 + 9900),)
    assert gather(layout.regions, 11) == bytes_of(buffer[11, :9500]) + bytes_of(buffer[11, 9600:9900])


def test_cross_layer_blocks_are_one_region_as_one_tensor_and_as_views() -> None:
    buffer = tensor_of((100, 6, 2, 16, 8))
    whole = describe_kv_caches({"all": buffer}, 100)
    assert offsets(whole, buffer) == [(0, 6144, 6144)]
    for order in (range(6), (3, 1, 5, 0, 2, 4)):
        layers = {f"layer {index}": buffer[:, index] for index in order}
        assert memory_of(describe_kv_caches(layers, 100)) == memory_of(whole)


def test_shared_slots_take_the_place_of_their_first_layer() -> None:
    slots, alone = tensor_of((100, 2, 8)), tensor_of((100, 4))
    layout = describe_kv_caches({"b": slots[:, 1], "alone": alone, "a": slots[:, 0]}, 100)
    assert layout.regions == (Region(slots.data_ptr(), 64, 64), Region(alone.data_ptr(), 16, 16))


@pytest.mark.parametrize(
    ("size", "stride", "start"),
    [
        (7, 10, 4),  # up to one byte into the other's next block
        (3, 20, 4),  # touching in the first block only
        (3, 10, 3),  # one byte in common
    ],
)
def test_tensors_that_share_no_slots_are_not_merged(size: int, stride: int, start: int) -> None:
    buffer = pattern(100)
    one, other = buffer.as_strided((4, size), (stride, 1), start), buffer.as_strided((4, 4), (10, 1))
    layout = describe_kv_caches({"one": one, "other": other}, 4, block_dim=0)
    assert offsets(layout, buffer) == [(start, stride, size), (0, 10, 4)]


def test_recurrent_states_are_two_tensors_per_layer() -> None:
    page = 4 * (3 * 12 + 2 * 8) + 48  # with padding
    buffer = pattern(30 * page).view(torch.float32)
    convolution = buffer.as_strided((30, 3, 12), (page // 4, 12, 1))
    state = buffer.as_strided((30, 2, 8), (page // 4, 8, 1), 36)
    layout = describe_kv_caches({"layer": [convolution, state]}, 30)
    assert offsets(layout, buffer) == [(0, page, 4 * 52)]
    assert gather(layout.regions, 29) == bytes_of(convolution[29]) + bytes_of(state[29])


def test_states_of_different_types_in_storages_of_their_own() -> None:
    states = tensor_of((30, 3, 12), torch.bfloat16), tensor_of((30, 2, 8))
    layout = describe_kv_caches({"layer": states}, 30)
    assert layout.regions == (Region(states[0].data_ptr(), 72, 72), Region(states[1].data_ptr(), 64, 64))
    assert len(layout.storages) == 2


def test_layers_that_share_a_cache_are_moved_once() -> None:
    cache = tensor_of((100, 16))
    twice = describe_kv_caches({"a": cache, "b": cache.view(100, 4, 4)}, 100)
    assert memory_of(twice) == memory_of(describe_kv_caches({"a": cache}, 100))


def test_kernel_blocks_are_parts_of_a_block() -> None:
    cache = tensor_of((400, 4, 8))  # four per block
    assert offsets(describe_kv_caches({"layer": cache}, 100), cache) == [(0, 512, 512)]
    heads = tensor_of((3, 400, 8))  # one region per head and block, its parts side by side
    layout = describe_kv_caches({"layer": heads}, 100, block_dim=1)
    assert offsets(layout, heads) == [(12_800 * head, 128, 128) for head in range(3)]
    padded = tensor_of((400, 10))[:, :8]
    layout = describe_kv_caches({"layer": padded}, 100)
    assert offsets(layout, padded) == [(40 * part, 160, 32) for part in range(4)]


def test_a_raw_buffer_is_cut_evenly() -> None:
    buffer = pattern(100 * 4096)
    assert offsets(describe_kv_caches({"layer": buffer}, 100), buffer) == [(0, 4096, 4096)]


def test_a_single_block_is_the_whole_tensor() -> None:
    for shape in ((1, 2, 16, 8), (2, 1, 16, 8), (2, 16, 8), (256,)):
        cache = tensor_of(shape)
        assert offsets(describe_kv_caches({"layer": cache}, 1), cache) == [(0, 1024, 1024)]


# Which dimension counts blocks


@pytest.mark.parametrize(
    ("shape", "num_blocks", "expected"),
    [
        ((16, 2, 16, 4, 8), 16, 0),  # tokens have the size of the blocks
        ((8, 2, 16, 8, 4), 8, 0),  # heads do
        ((2, 16, 3, 16, 4), 16, 1),
        ((8, 2, 8, 8, 4), 8, 0),
    ],
)
def test_strides_tell_dimensions_of_one_size_apart(shape: tuple[int, ...], num_blocks: int, expected: int) -> None:
    cache = tensor_of(shape)
    decided = describe_kv_caches({"layer": cache}, num_blocks)
    assert decided == describe_kv_caches({"layer": cache}, num_blocks, block_dim=expected)
    turned = cache.permute(*reversed(range(cache.ndim)))  # strides decide, not the place in the shape
    assert memory_of(describe_kv_caches({"layer": turned}, num_blocks)) == memory_of(decided)


@pytest.mark.parametrize(
    ("shape", "num_blocks", "dims"),
    [
        ((2, 2, 16, 4, 8), 2, r"\[0, 1\]"),  # blocks and K/V, in either order
        ((2, 6, 2, 16), 2, r"\[0, 2\]"),
        ((8, 8, 16, 4), 8, r"\[0, 1\]"),  # blocks and heads
        ((2, 16, 16, 4), 16, r"\[1, 2\]"),  # blocks and tokens
        ((16, 1, 16, 4), 16, r"\[0, 2\]"),  # a dimension of size 1 lies nowhere
    ],
)
def test_dimensions_that_look_alike_are_refused(shape: tuple[int, ...], num_blocks: int, dims: str) -> None:
    cache = tensor_of(shape)
    with pytest.raises(LayoutError, match=rf"dimensions {dims} of layer 'a'.* {num_blocks} blocks.* say block_dim="):
        describe_kv_caches({"a": cache}, num_blocks)
    for block_dim in (axis for axis, size in enumerate(shape) if size == num_blocks):
        layout = describe_kv_caches({"a": cache}, num_blocks, block_dim=block_dim)
        assert region_addrs(layout.regions, 1) == block_addrs(cache, block_dim, 1)


def test_block_dim_by_layer() -> None:
    blocks_first, heads_first = tensor_of((8, 8, 4)), tensor_of((8, 8, 4))
    caches = {"a": blocks_first, "b": heads_first, "c": tensor_of((8, 3))}
    layout = describe_kv_caches(caches, 8, block_dim={"a": 0, "b": 1})
    assert [region.block_bytes for region in layout.regions] == [128, *[16] * 8, 12]


# Several groups


def test_groups_share_storages_and_register_them_once() -> None:
    shared, own = tensor_of((100, 64)), tensor_of((100, 8))
    recurrent = [shared[:, 8:24], shared[:, 24:60]]
    layout = describe_kv_cache_groups([{"a": shared[:, :32], "own": own}, {"b": recurrent}], 100)
    assert layout.regions == (
        (Region(shared.data_ptr(), 256, 128), Region(own.data_ptr(), 32, 32)),
        (Region(shared.data_ptr() + 32, 256, 208),),
    )
    assert layout.storages == (Storage(shared.data_ptr(), 99 * 256 + 240), Storage(own.data_ptr(), 3200))


def test_storages_that_are_the_same_memory_count_as_one() -> None:
    memory = bytearray(6400)
    one, other = (torch.frombuffer(memory, dtype=torch.uint8, offset=offset) for offset in (0, 64))
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    caches = {"a": one[:3200].view(100, 32), "b": other[3136:].view(100, 32)}
    assert describe_kv_caches(caches, 100).storages == (Storage(one.data_ptr(), 6400),)


def test_storages_side_by_side_stay_two() -> None:
    memory = bytearray(6400)
    one, other = (torch.frombuffer(memory, dtype=torch.uint8, count=3200, offset=offset) for offset in (0, 3200))
    layout = describe_kv_caches({"b": other.view(100, 32), "a": one.view(100, 32)}, 100)
    assert layout.storages == (Storage(other.data_ptr(), 3200), Storage(one.data_ptr(), 3200))


def test_groups_are_those_described_one_by_one() -> None:
    groups = [{"a": tensor_of((20, 2, 8))}, {"b": tensor_of((2, 20, 8)), "c": tensor_of((20, 3))}]
    layout = describe_kv_cache_groups(groups, 20)
    alone = [describe_kv_caches(group, 20) for group in groups]
    assert layout.regions == tuple(one.regions for one in alone)
    assert layout.storages == alone[0].storages + alone[1].storages


# Refusals


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


@pytest.mark.parametrize(
    ("kv_caches", "num_blocks", "message"),
    [
        ({}, 4, "0 layers in group 0"),
        ({"a": []}, 4, "0 tensors in layer 'a'"),
        ({"a": torch.zeros(4, 8)}, 0, "num_blocks is 0, less than 1"),
        ({"a": torch.zeros(4, 8)}, -4, "num_blocks is -4, less than 1"),
        ({"a": torch.zeros(1, 8)}, True, "num_blocks is True, which is not an integer"),
        ({"a": torch.zeros(4, 8)}, 4.0, "num_blocks is 4.0, which is not an integer"),
        ({"a": torch.zeros(4, 0)}, 4, "layer 'a' of shape (4, 0) has 0 elements"),
        ({"a": "text"}, 4, "tensor 0 of layer 'a' is a str, not a tensor"),
        ({"a": None}, 4, "layer 'a' is a NoneType, not a tensor"),
        ({"a": sparse()}, 4, "layer 'a' of shape (4, 4) is torch.sparse_coo: only strided tensors have addresses"),
        ({"a": torch.zeros(4, 8, device="meta")}, 4, "layer 'a' of shape (4, 8) has no memory"),
        ({"a": torch.zeros(10, 65)}, 16, "16 blocks do not divide its storage of 2600 bytes"),
        ({"a": torch.zeros(10, 64)}, 4, "(10, 64) and byte strides (256, 4) has no dimension of 4 blocks"),
        ({"a": torch.tensor(1.0)}, 4, "layer 'a' of shape () and byte strides () has no dimension of 4 blocks"),
        ({"a": torch.zeros(8, 3), "b": torch.zeros(6, 4)}, 8, "layer 'b' of shape (6, 4)"),
        ({"a": [torch.zeros(8, 3), torch.zeros(7, 3)]}, 8, "tensor 1 of layer 'a' of shape (7, 3)"),
        ({"a": torch.zeros(4, 1).expand(4, 8)}, 4, "dimension 1 of size 8 has a stride of 0 bytes, and each step"),
        ({"a": torch.zeros(8).expand(4, 8)}, 4, "dimension 0 of size 4 has a stride of 0 bytes, and each step"),
        (
            {"a": torch.zeros(99).as_strided((4, 8), (5, 1))},
            4,
            "dimension 0 of size 4 has a stride of 20 bytes, and each step covers 32 bytes",
        ),
        (
            {"a": torch.zeros(99).as_strided((2, 3), (3, 2))},
            2,
            "dimension 0 of size 2 has a stride of 12 bytes, and each step covers 20 bytes",
        ),
        (
            {"a": torch.zeros(4, 65_537, 2, dtype=torch.uint8)[:, :, 0]},
            4,
            "falls into 65537 runs of 1 bytes, more than 65536: does dimension 0 count 4 blocks?",
        ),
    ],
)
def test_refusals_carry_the_numbers(kv_caches: Mapping[str, Any], num_blocks: int, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        describe_kv_caches(kv_caches, num_blocks)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("block_dim", "message"),
    [
        (1, "dimension 1 of layer 'a' of shape (8, 6) and byte strides (24, 4) has size 6, which is no multiple of 8"),
        (2, "has 2 dimensions, and no dimension 2 to count blocks"),
        (-1, "block_dim is -1, less than 0"),
        (False, "block_dim is False, which is not an integer"),
        ({"b": 0}, "block_dim names ['b'], which are not among the layers"),
    ],
)
def test_what_the_engine_says_is_checked(block_dim: int | dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        describe_kv_caches({"a": torch.zeros(8, 6)}, 8, block_dim=block_dim)
    assert message in str(caught.value)


def test_no_groups_are_refused() -> None:
    with pytest.raises(LayoutError, match="0 groups of KV caches"):
        describe_kv_cache_groups([], 4)


# The upper half of the address space, where no CPU tensor lies


def tensor_at(addr: int, storage_addr: int, storage_bytes: int) -> torch.Tensor:
    """Returns what says about itself what a tensor of shape (4, 8) and of one-byte elements would."""
    storage = SimpleNamespace(data_ptr=lambda: storage_addr, nbytes=lambda: storage_bytes)
    tensor: Any = SimpleNamespace(
        shape=(4, 8),
        layout="torch.strided",
        dtype="torch.uint8",
        device="gpu",
        numel=lambda: 32,
        data_ptr=lambda: addr,
        element_size=lambda: 1,
        stride=lambda: (16, 1),
        untyped_storage=lambda: storage,
    )
    is_tensor: torch.Tensor = tensor
    return is_tensor


@pytest.mark.parametrize("addr", [1 << 63, (1 << 64) - 56])
def test_addresses_up_to_the_last_one(addr: int) -> None:
    layout = describe_kv_caches({"a": tensor_at(addr, addr, 56)}, 4)
    assert layout == KVLayout((Region(addr, 16, 8),), (Storage(addr, 56),), "uint8", "1x[n*8]")
    negative = addr - (1 << 64)
    assert describe_kv_caches({"a": tensor_at(negative, negative, 56)}, 4) == layout


@pytest.mark.parametrize("addr", [(1 << 64) - 55, (1 << 64) - 1])
def test_addresses_past_the_last_one_are_refused(addr: int) -> None:
    with pytest.raises(AddressOverflowError, match=f"covers 56 bytes at {addr:#x}"):
        describe_kv_caches({"a": tensor_at(addr, addr, 56)}, 4)


@pytest.mark.parametrize(("addr", "storage_bytes"), [(4095, 64), (4096, 55), (4104, 63)])
def test_views_outside_their_storage_are_refused(addr: int, storage_bytes: int) -> None:
    with pytest.raises(LayoutError, match=f"outside its storage of {storage_bytes} bytes at 0x1000"):
        describe_kv_caches({"a": tensor_at(addr, 4096, storage_bytes)}, 4)


# Properties


@st.composite
def strided_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Draws a tensor of any memory order and padding, its block dimension, and the number of blocks."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    block_dim = draw(st.integers(0, len(shape) - 1))
    num_blocks = shape[block_dim]
    if draw(st.booleans()):
        shape[block_dim] *= draw(st.integers(2, 3))  # kernel blocks
    strides = [0] * len(shape)
    covered = 1
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = covered + draw(st.sampled_from([0, 0, 0, 1, 3]))
        covered = strides[axis] * shape[axis]
    start, tail = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    dtype = draw(st.sampled_from(DTYPES))
    buffer = pattern((start + covered + tail) * dtype.itemsize).view(dtype)
    return buffer.as_strided(shape, strides, start), block_dim, num_blocks


def block_bytes_at(tensor: torch.Tensor, block_dim: int, num_blocks: int, block_id: int) -> list[int]:
    """Returns `block_addrs` of a block that may consist of several kernel blocks."""
    num_parts = tensor.shape[block_dim] // num_blocks
    parts = range(block_id * num_parts, (block_id + 1) * num_parts)
    return sorted(addr for part in parts for addr in block_addrs(tensor, block_dim, part))


@settings(deadline=None)  # on a busy machine any example may take long
@given(strided_tensors())
def test_regions_are_exactly_the_bytes_of_a_block(drawn: tuple[torch.Tensor, int, int]) -> None:
    tensor, block_dim, num_blocks = drawn
    layout = describe_kv_caches({"layer": tensor}, num_blocks, block_dim=block_dim)
    covered = set()
    for block_id in range(num_blocks):
        expected = block_bytes_at(tensor, block_dim, num_blocks, block_id)
        assert region_addrs(layout.regions, block_id) == expected
        start = tensor.untyped_storage().data_ptr()
        assert gather(layout.regions, block_id) == bytes((addr - start) % PERIOD for addr in expected)
        covered.update(expected)
    assert layout.storages == (Storage(min(covered), max(covered) + 1 - min(covered)),)
    check_inside(layout.regions, layout.storages, num_blocks)
    num_runs = 1 + sum(after != before + 1 for before, after in pairwise(expected))
    assert len(layout.regions) == num_runs


@settings(deadline=None)  # on a busy machine any example may take long
@given(strided_tensors())
def test_a_decision_without_the_engine_is_one_that_it_could_make(drawn: tuple[torch.Tensor, int, int]) -> None:
    tensor, block_dim, num_blocks = drawn
    sizes = [size for size in tensor.shape if size == num_blocks]
    try:
        decided = describe_kv_caches({"layer": tensor}, num_blocks)
    except LayoutError:
        outside = [size for size in tensor.shape if size > num_blocks and size % num_blocks == 0]
        assert len(sizes) != 1 or outside, "one dimension of that size, and none that may count its parts"
        return
    choices = [
        describe_kv_caches({"layer": tensor}, num_blocks, block_dim=axis)
        for axis, size in enumerate(tensor.shape)
        if size == num_blocks or (not sizes and size % num_blocks == 0)
    ]
    assert decided in choices
    if sizes == [tensor.shape[block_dim]]:
        assert decided == describe_kv_caches({"layer": tensor}, num_blocks, block_dim=block_dim)


@settings(deadline=None)  # on a busy machine any example may take long
@given(st.data())
def test_layers_in_shared_slots_move_their_bytes_once_in_memory_order(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(2, 4))
    pieces = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=6))
    slot_bytes = sum(gap + size for gap, size in pieces) + data.draw(st.integers(0, 3))
    buffer = tensor_of((num_blocks, slot_bytes), torch.uint8)
    layers: list[torch.Tensor] = []
    taken: list[int] = []
    end = 0
    for gap, size in pieces:
        layers.append(buffer[:, end + gap : end + gap + size])
        taken += range(end + gap, end + gap + size)
        end += gap + size
    order = data.draw(st.permutations(range(len(layers))))
    caches = {str(index): layers[index] for index in order}
    layout = describe_kv_caches(caches, num_blocks, block_dim=0)
    for block_id in range(num_blocks):
        assert gather(layout.regions, block_id) == bytes_of(buffer[block_id, taken])
    assert len(layout.regions) == 1 + sum(after != before + 1 for before, after in pairwise(taken))
    check_inside(layout.regions, layout.storages, num_blocks)


@settings(deadline=None)  # on a busy machine any example may take long
@given(st.data())
def test_tensors_that_overlap_in_any_way_lose_no_byte(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 4))
    buffer = pattern(400)
    views = []
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, 12))
        stride, start = size + data.draw(st.integers(0, 9)), data.draw(st.integers(0, 300))
        assume(start + (num_blocks - 1) * stride + size <= 400)
        views.append(buffer.as_strided((num_blocks, size), (stride, 1), start))
    caches = {str(index): view for index, view in enumerate(views)}
    layout = describe_kv_caches(caches, num_blocks, block_dim=0)
    for block_id in range(num_blocks):
        wanted = {addr for view in views for addr in block_addrs(view, 0, block_id)}
        assert set(region_addrs(layout.regions, block_id)) == wanted
    assert all(region.block_bytes <= region.block_stride for region in layout.regions)
    check_inside(layout.regions, layout.storages, num_blocks)
    assert layout == describe_kv_caches(caches, num_blocks, block_dim=0)


# Registration


class RecordingStore:
    """Answers what the test chose, by address, and writes down every call."""

    def __init__(self, answers: Mapping[int, int | Exception] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = dict(answers or {})
        self.unregister_answers: dict[int, int | Exception] = {}

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.calls.append(("register", buffer_ptr, size))
        return self._answer(self.answers.get(buffer_ptr, 0))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        self.calls.append(("unregister", buffer_ptr))
        return self._answer(self.unregister_answers.get(buffer_ptr, 0))

    @staticmethod
    def _answer(answer: int | Exception) -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer


STORAGES = [Storage(0x3000, 300), Storage(0x1000, 100), Storage(0x2000, 200)]
REGISTERED = [("register", 0x3000, 300), ("register", 0x1000, 100), ("register", 0x2000, 200)]
UNREGISTERED = [("unregister", 0x2000), ("unregister", 0x1000), ("unregister", 0x3000)]


def test_registration_in_order_and_back() -> None:
    store = RecordingStore()
    registration = register(store, STORAGES)
    assert isinstance(registration, Registration)
    assert store.calls == REGISTERED
    registration.unregister()
    registration.unregister()
    assert store.calls == REGISTERED + UNREGISTERED


def test_equal_storages_are_registered_once() -> None:
    store = RecordingStore()
    register(store, STORAGES + STORAGES).unregister()
    assert store.calls == REGISTERED + UNREGISTERED


def test_nothing_to_register() -> None:
    store = RecordingStore()
    register(store, []).unregister()
    assert not store.calls


@pytest.mark.parametrize("num_good", [0, 1, 2])
@pytest.mark.parametrize("code", [-600, -800, 1])
def test_a_refused_registration_takes_back_what_came_before(num_good: int, code: int) -> None:
    bad = STORAGES[num_good]
    store = RecordingStore({bad.addr: code})
    with pytest.raises(StoreError, match=rf"register_buffer answered {code} .*{bad.num_bytes} bytes at {bad.addr:#x}"):
        register(store, STORAGES)
    assert store.calls == REGISTERED[: num_good + 1] + UNREGISTERED[len(STORAGES) - num_good :]


def test_what_a_store_raises_comes_through_after_the_same() -> None:
    store = RecordingStore({0x2000: OSError("no device")})
    with pytest.raises(OSError, match="no device"):
        register(store, STORAGES)
    assert store.calls == REGISTERED + UNREGISTERED[1:]


def test_failures_on_the_way_back_hide_neither_the_error_nor_other_storages() -> None:
    store = RecordingStore({0x2000: -600})
    store.unregister_answers = {0x1000: OSError("gone")}
    with pytest.raises(StoreError, match="register_buffer answered -600") as caught:
        register(store, STORAGES)
    assert caught.value.__notes__ == ["unregister_buffer raised OSError('gone') for 0x1000"]
    assert store.calls[-1] == ("unregister", 0x3000)


def test_unregistering_tries_every_storage_once() -> None:
    store = RecordingStore()
    registration = register(store, STORAGES)
    store.unregister_answers = {0x2000: OSError("gone"), 0x3000: -600}
    with pytest.raises(StoreError, match=r"raised OSError\('gone'\) for 0x2000; .*-600 .* for 0x3000"):
        registration.unregister()
    registration.unregister()
    assert store.calls == REGISTERED + UNREGISTERED


def test_a_guarded_store_will_do() -> None:
    raw: Any = RecordingStore()
    store = GuardedStore(raw, is_set_up=True)
    is_store: Store = store
    register(is_store, STORAGES).unregister()
    assert raw.calls == REGISTERED + UNREGISTERED


def test_tensors_are_registered_and_readable_end_to_end() -> None:
    store = RecordingStore()
    caches = {"a": tensor_of((10, 2, 8)), "b": tensor_of((2, 10, 8))}
    layout = describe_kv_caches(caches, 10)
    register(store, layout.storages)
    assert [call[1:] for call in store.calls] == [(cache.data_ptr(), 640) for cache in caches.values()]


def test_importing_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import mooncrate, mooncrate.kv_caches, mooncrate.groups"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
