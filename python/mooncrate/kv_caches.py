"""Torch tensors to regions: where the bytes of every block lie, and which memory a store has to know.

# Rationale
An object in the pool is the bytes of one block, region after region. So the order of the regions is a contract between
all processes that share keys, now and later:

1. tensors in the order of the mapping, and of the sequence where a layer has several; the same bytes once;
2. within a tensor, the dense runs of a block in order of address;
3. tensors that share slots (same stride, each between two blocks of the others) count as one, at the place of the
   first of them, in order of address. Runs that touch there are one region: layers that fill their slots without a gap
   are read like the one buffer that they were cut from.

Where vLLM 0.32.0 moves no padding this gives its objects byte for byte: blocks first ``(num_blocks, 2, ...)``, latent
``(num_blocks, block_size, dim)``, a region per head of head-major blocks, the whole slot of interleaved layers. For
``(2, num_blocks, ...)`` it gives the K and V regions of vLLM 0.27.1. Only a tensor's own bytes move: vLLM stores the
padding of a slot as well, so there its objects are longer and the two cannot share them.

# Limitations
A shape does not say which dimension counts blocks. `describe_kv_caches` has the rule; what it cannot tell apart is
refused until the engine says ``block_dim``. An engine that knows it should always say so. With a single block nothing
shows that tensors share slots, so they stay in the order of the mapping.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mooncrate.errors import LayoutError, StoreError
from mooncrate.groups import check_integer
from mooncrate.layout_text import describe_dtypes, describe_group, natural_key
from mooncrate.store import describe
from mooncrate.tensor_view import Region, TensorView

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BufferStore",
    "KVGroupsLayout",
    "KVLayout",
    "Region",
    "Registration",
    "Storage",
    "describe_kv_cache_groups",
    "describe_kv_caches",
    "register",
]


class Storage(NamedTuple):
    """Memory to register: ``num_bytes`` from ``addr`` on."""

    addr: int
    num_bytes: int


@dataclass(frozen=True)
class KVLayout:
    """Where the KV cache of one group lies.

    Attributes:
        regions: In the order in which their bytes are stored.
        storages: The memory that the regions lie in, in order of first use. One per storage of torch, however many
            tensors view it, and one for several that are the same memory; from the first to the last byte that a
            tensor covers, so never more than the storage, and less where nothing views its ends.
        dtype: Type of the numbers; several, joined by ``+``, in the natural order of layers.
        text: What the bytes of a block mean, in words of `mooncrate.layout_text`.
    """

    regions: tuple[Region, ...]
    storages: tuple[Storage, ...]
    dtype: str
    text: str


@dataclass(frozen=True)
class KVGroupsLayout:
    """Where the KV cache of several groups lies.

    Attributes:
        regions: The regions of each group.
        storages: The memory of all groups, each storage once, as in `KVLayout`.
        dtypes: The type of each group.
        texts: The text of each group.
    """

    regions: tuple[tuple[Region, ...], ...]
    storages: tuple[Storage, ...]
    dtypes: tuple[str, ...]
    texts: tuple[str, ...]


def describe_kv_caches(
    kv_caches: Mapping[str, Tensor | Sequence[Tensor]],
    num_blocks: int,
    *,
    block_dim: int | Mapping[str, int] | None = None,
) -> KVLayout:
    """Returns the regions and storages of one group. Reads metadata only, so the tensors may be on any device.

    The dimension that counts blocks, of each tensor, is:

    - ``block_dim`` where the engine says it. Its size may be a multiple of ``num_blocks``, for engines that cut a block
      into several kernel blocks;
    - the only dimension of size ``num_blocks``;
    - with several of that size the one with the largest stride, if some other dimension lies between it and the next
      of them in memory: K and V, heads and layers that lie outside the blocks lie directly outside. Neighbours, and
      dimensions of size 2 when there are two blocks, look the same either way and are refused;
    - with none of that size the outermost in memory, if its size is a multiple and ``num_blocks`` divides the storage:
      raw buffers and kernel blocks.

    Args:
        kv_caches: Per layer a tensor, or several for layers that keep several states.
        num_blocks: Blocks in every tensor.
        block_dim: The dimension that counts blocks, from 0, for all tensors or by layer.

    Raises:
        LayoutError: Nothing to describe, no memory, elements that share bytes, or no dimension that counts blocks.
        AddressOverflowError: Memory that does not fit 64-bit addresses.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2, 100, 16, 4, 8)  # K and V, blocks, tokens, heads, head size
        >>> layout = describe_kv_caches({"layer": cache}, num_blocks=100)
        >>> [(addr - cache.data_ptr(), stride, num_bytes) for addr, stride, num_bytes in layout.regions]
        [(0, 2048, 2048), (204800, 2048, 2048)]
    """
    layout = describe_kv_cache_groups([kv_caches], num_blocks, block_dim=block_dim)
    return KVLayout(layout.regions[0], layout.storages, layout.dtypes[0], layout.texts[0])


def describe_kv_cache_groups(
    groups: Sequence[Mapping[str, Tensor | Sequence[Tensor]]],
    num_blocks: int,
    *,
    block_dim: int | Mapping[str, int] | None = None,
) -> KVGroupsLayout:
    """Returns the regions of each of several groups, and their storages, which groups may share.

    Args:
        groups: Per group what `describe_kv_caches` takes.
        num_blocks: Blocks in every tensor of every group.
        block_dim: As in `describe_kv_caches`.

    Raises:
        LayoutError: As in `describe_kv_caches`, also when ``block_dim`` names a layer that no group has.
        AddressOverflowError: As in `describe_kv_caches`.
    """
    check_integer("num_blocks", num_blocks, least=1)
    if not groups:
        raise LayoutError("0 groups of KV caches: there is nothing to describe")
    if isinstance(block_dim, Mapping) and (unknown := set(block_dim).difference(*groups)):
        raise LayoutError(f"block_dim names {sorted(unknown)}, which are not among the layers")
    views: list[TensorView] = []
    described: list[tuple[tuple[Region, ...], str, str]] = []
    for group_id, kv_caches in enumerate(groups):
        if not kv_caches:
            raise LayoutError(f"0 layers in group {group_id}: there is nothing to describe")
        group_views = {layer: _views_of(layer, value) for layer, value in kv_caches.items()}
        described.append(_describe_group(group_views, num_blocks, block_dim))
        views += itertools.chain.from_iterable(group_views.values())
    regions, dtypes, texts = zip(*described, strict=True)
    return KVGroupsLayout(regions, _storages_of(views), dtypes, texts)


class BufferStore(Protocol):
    """The calls of `mooncrate.store.Store` that registration needs; 0 is success."""

    def register_buffer(self, buffer_ptr: int, size: int, /) -> int:
        """Makes a range known to the transport."""
        ...

    def unregister_buffer(self, buffer_ptr: int, /) -> int:
        """Takes it back."""
        ...


def register(store: BufferStore, storages: Sequence[Storage]) -> Registration:
    """Registers each storage once, in the given order: all of them, or after a failure none.

    Raises:
        StoreError: The store refused one, with its code; what had been registered before is unregistered again. What
            the store raises comes through unchanged, after the same. Failures on the way back are notes on the error.
    """
    addrs: list[int] = []
    try:
        for storage in dict.fromkeys(storages):
            _register_one(store, storage)
            addrs.append(storage.addr)
    except BaseException as error:
        for failure in _unregister(store, addrs):
            error.add_note(failure)
        raise
    return Registration(store, addrs)


class Registration:
    """Memory that a store knows until `unregister`. Safe to use from many threads."""

    def __init__(self, store: BufferStore, addrs: Sequence[int]) -> None:
        """Takes over what `register` has registered."""
        self._store = store
        self._addrs = list(addrs)
        self._lock = threading.Lock()

    def unregister(self) -> None:
        """Unregisters everything, last first. Idempotent: each storage is tried once, also when this raises.

        Raises:
            StoreError: The store refused some of them; the others are unregistered.
        """
        with self._lock:
            addrs, self._addrs = self._addrs, []
            failures = _unregister(self._store, addrs)
        if failures:
            raise StoreError("; ".join(failures))


def _register_one(store: BufferStore, storage: Storage) -> None:
    if code := store.register_buffer(storage.addr, storage.num_bytes):
        raise StoreError(
            f"register_buffer answered {describe(code)} for {storage.num_bytes} bytes at {storage.addr:#x}"
        )


def _unregister(store: BufferStore, addrs: Sequence[int]) -> list[str]:
    """Unregisters all, last first, whatever happens, and returns what failed."""
    failures = []
    for addr in reversed(addrs):
        try:
            if code := store.unregister_buffer(addr):
                failures.append(f"unregister_buffer answered {describe(code)} for {addr:#x}")
        except Exception as error:  # the other storages still have to go
            failures.append(f"unregister_buffer raised {error!r} for {addr:#x}")
    return failures


def _views_of(layer: str, value: Tensor | Sequence[Tensor]) -> list[TensorView]:
    if not isinstance(value, Sequence):
        return [TensorView.of(f"layer {layer!r}", value)]
    if not value:
        raise LayoutError(f"0 tensors in layer {layer!r}: there is nothing to describe")
    return [TensorView.of(f"tensor {index} of layer {layer!r}", tensor) for index, tensor in enumerate(value)]


def _describe_group(
    views: Mapping[str, Sequence[TensorView]], num_blocks: int, block_dim: int | Mapping[str, int] | None
) -> tuple[tuple[Region, ...], str, str]:
    """Returns regions, type and text of one group."""
    tensors: list[tuple[str, str]] = []
    first_owner = {}
    said = {layer: block_dim.get(layer) if isinstance(block_dim, Mapping) else block_dim for layer in views}
    for layer in sorted(views, key=natural_key):
        first_owner[layer] = len(tensors)
        tensors += [(view.describe_order(num_blocks, said[layer]), view.dtype) for view in views[layer]]
    owner_of: dict[Region, int] = {}
    for layer, layer_views in views.items():
        for owner, view in enumerate(layer_views, first_owner[layer]):
            for region in view.regions(num_blocks, said[layer]):
                # Of layers that view the same bytes the first by name, whatever the order of the mapping.
                owner_of[region] = min(owner, owner_of.get(region, owner))
    regions, owners = _in_order(owner_of, num_blocks)
    return regions, describe_dtypes(dtype for _, dtype in tensors), describe_group(tensors, owners)


def _in_order(owner_of: Mapping[Region, int], num_blocks: int) -> tuple[tuple[Region, ...], list[int]]:
    """Sorts and merges regions that share slots, see the module; returns whose they are, from before they merge."""
    unique = list(owner_of)
    spans = [(base, base + (num_blocks - 1) * stride + num_bytes) for base, stride, num_bytes in unique]
    ordered: list[Region] = []
    owners: list[int] = []
    for indexes in _overlapping(spans):
        members = [unique[index] for index in indexes]
        merged = _merged(members)
        ordered += merged or members
        owners += [owner_of[region] for region in (sorted(members) if merged else members)]
    return tuple(ordered), owners


def _merged(members: Sequence[Region]) -> list[Region]:
    """Merges regions that lie beside each other in the same slots; returns none when they do not lie like that."""
    merged: list[Region] = []
    slot_start = min(region.base_addr for region in members)
    for region in sorted(members):
        end = region.base_addr + region.block_bytes
        last = merged[-1] if merged else None
        if region.block_stride != members[0].block_stride or end > slot_start + region.block_stride:
            return []
        if last is None or region.base_addr > last.base_addr + last.block_bytes:
            merged.append(region)
        elif region.base_addr == last.base_addr + last.block_bytes:
            merged[-1] = last._replace(block_bytes=end - last.base_addr)
        else:
            return []
    return merged


def _storages_of(views: Sequence[TensorView]) -> tuple[Storage, ...]:
    """Returns the span of all views per storage; storages that are the same memory count as one."""
    storages = []
    for indexes in _overlapping([(view.storage_start, view.storage_end) for view in views]):
        start = min(views[index].start for index in indexes)
        storages.append(Storage(start, max(views[index].end for index in indexes) - start))
    return tuple(storages)


def _overlapping(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Groups half-open spans that share bytes, also through others. Returns their indexes, in order of the first."""
    clusters: list[list[int]] = []
    end = 0
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        if not clusters or spans[index][0] >= end:
            clusters.append([])
        clusters[-1].append(index)
        end = max(end, spans[index][1])
    return sorted(sorted(cluster) for cluster in clusters)
