"""How chunks get to the store and back: what is to be moved, in which batches, through calls that never raise.

A request becomes one plan over all groups, in order of where the chunks end: should the store stop in the middle, every
group has the same prefix. It goes out in batches that are bounded in integers to convert, in bytes, and in addresses in
flight over all threads.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mooncrate import _core
from mooncrate.errors import LayoutError, StoreError
from mooncrate.groups import GroupKind
from mooncrate.metrics import Count, Recorder, Timing
from mooncrate.store import ResultCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from mooncrate.data import ChunkedTokenDatabase
    from mooncrate.groups import CacheGroup
    from mooncrate.keyspace import KeySpace
    from mooncrate.kv_caches import KVGroupsLayout
    from mooncrate.pacing import AddressBudget, PoolLimits
    from mooncrate.requests import ReqMeta
    from mooncrate.store import Store

logger = logging.getLogger(__name__)


class DeviceEvent(Protocol):
    """Work of a device that has to be done before its memory may be read or written, like a ``torch.Event``."""

    def synchronize(self) -> object:
        """Waits until it is done."""
        ...


class ChunkMask(Protocol):
    """Says which chunks of a group are worth saving."""

    def __call__(self, group_id: int, start_chunk: int, end_chunk: int, /) -> Sequence[bool] | None:
        """Returns one flag for each chunk from ``start_chunk`` up to ``end_chunk``; None if all are."""
        ...


@dataclass(frozen=True)
class RegisteredGroup:
    """A group as workers need it.

    Attributes:
        group: What it is.
        database: Its keys and addresses.
        put_step: Ranks that share the saving of its chunks.
        put_step_rank: The remainder that this rank saves.
        row_bytes: Bytes of one chunk over all regions.
        num_regions: Regions, which is the addresses of one chunk.
    """

    group: CacheGroup
    database: ChunkedTokenDatabase
    put_step: int
    put_step_rank: int
    row_bytes: int
    num_regions: int


@dataclass(frozen=True)
class Request:
    """What a job needs of a `ReqMeta`, as it was when the job was queued.

    Attributes:
        req_id: For messages.
        block_hashes: As they were: an engine that reuses the list or the buffer does not change what a job saves.
        block_ids: The block table of each group.
        events: To wait for before blocks are touched.
        num_tokens: Tokens to save, or to have loaded.
        num_cached_tokens: Of a load: tokens that the engine holds already. Of a save: tokens that need not be saved.
        lists_saved: Of a save: whether its result says which chunks were put.
        chunk_mask: Of a save: says which chunks are worth it, None for all.
    """

    req_id: str
    block_hashes: Sequence[bytes | memoryview]
    block_ids: tuple[tuple[int, ...], ...]
    events: tuple[DeviceEvent, ...]
    num_tokens: int
    num_cached_tokens: int = 0
    lists_saved: bool = False
    chunk_mask: ChunkMask | None = None

    @classmethod
    def of(
        cls,
        req: ReqMeta,
        event: DeviceEvent | None,
        num_tokens: int,
        num_cached_tokens: int = 0,
        lists_saved: bool = False,
        chunk_mask: ChunkMask | None = None,
    ) -> Request:
        """Takes the snapshot."""
        events = tuple(one for one in (req.current_event, event) if one is not None)
        block_ids = tuple(tuple(ids) for ids in req.block_ids)
        hashes = snapshot(req.block_hashes)
        return cls(req.req_id, hashes, block_ids, events, num_tokens, num_cached_tokens, lists_saved, chunk_mask)


def snapshot(block_hashes: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """Returns hashes that nobody can change any more: jobs read them later, when the engine may have reused its memory.

    Only ``bytes`` are shared. A view that cannot be written through says nothing about who else writes.
    """
    if isinstance(block_hashes, _core.BlobBlockHashes):
        if not len(block_hashes) or type(block_hashes[0].obj) is bytes:
            return block_hashes
        return _core.BlobBlockHashes(b"".join(block_hashes), block_hashes[0].nbytes)
    hashes = list(block_hashes)
    if set(map(type, hashes)) <= {bytes}:
        return hashes
    return [bytes(memoryview(one)) for one in hashes]  # through a view: bytes(5) would be five zeros


@dataclass(frozen=True)
class Channel:
    """The way to the store that all workers of a pool share.

    Attributes:
        store: The store.
        groups: The groups, registered.
        null_block_id: Block that holds nothing.
        unit: Least common multiple of all block sizes.
        limits: Bounds of one call.
        budget: Addresses in flight over all threads.
        recorder: Gets counts and timings.
        is_stopped: Whether nothing more may be sent.
        put_config: Goes with every put; the store's own default if None.
    """

    store: Store
    groups: tuple[RegisteredGroup, ...]
    null_block_id: int | None
    unit: int
    limits: PoolLimits
    budget: AddressBudget
    recorder: Recorder
    is_stopped: Callable[[], bool]
    put_config: object = None

    def plan(self, request: Request, plan_of: Callable[[RegisteredGroup, tuple[int, ...]], _core.TransferPlan]) -> Work:
        """Plans all groups of a request, in order of the chunks' ends."""
        if len(request.block_ids) != len(self.groups):
            raise LayoutError(
                f"request {request.req_id} has block tables for {len(request.block_ids)} KV cache groups, not "
                f"{len(self.groups)}"
            )
        size = self.groups[0].database.hash_block_size
        if (num_hashes := len(request.block_hashes)) < request.num_tokens // size:
            # Without this check no hashes would mean no chunks, and so nothing left to do.
            raise LayoutError(
                f"request {request.req_id} has {num_hashes} hashes of {size} tokens for {request.num_tokens} tokens"
            )
        with self.recorder.timed(Timing.PLAN):
            plans = [plan_of(group, ids) for group, ids in zip(self.groups, request.block_ids, strict=True)]
            for group_id, plan in enumerate(plans):
                _check_distinct(request.req_id, group_id, plan.block_ids)
            num_null_blocks = sum(plan.num_null_blocks for plan in plans)
            has_hole = any(
                plan.num_null_blocks and group.group.kind is GroupKind.FULL_ATTENTION
                for group, plan in zip(self.groups, plans, strict=True)
            )
            if len(plans) == 1:
                work = Work(plans[0], (0,) * len(plans[0]), self, num_null_blocks, has_hole)
            else:
                joined = _core.TransferPlan.concat(plans)
                group_ids = [group_id for group_id, plan in enumerate(plans) for _ in range(len(plan))]
                chunks = joined.chunks
                order = sorted(range(len(joined)), key=lambda index: chunks[index][1])
                ordered = tuple(group_ids[index] for index in order)
                work = Work(joined.select(order), ordered, self, num_null_blocks, has_hole)
        self.recorder.add(Count.NULL_BLOCKS, num_null_blocks)
        return work

    def batches(self, plan: _core.TransferPlan) -> list[_core.TransferPlan]:
        """Cuts a plan into what goes out in one call."""
        max_addrs = self.limits.max_batch_integers // 2  # each address comes with a size
        if self.budget.limit is not None:
            max_addrs = min(max_addrs, self.budget.limit)
        return plan.split(max_bytes=self.limits.max_batch_bytes, max_segments=max_addrs)

    def exists(self, keys: list[str]) -> Answers:
        """Asks which keys are there; where the store gave no answer it is 0."""
        codes: list[int] = []
        for start in range(0, len(keys), self.limits.max_keys_per_exists):
            part = keys[start : start + self.limits.max_keys_per_exists]
            found, error = self._call(Timing.EXISTS, partial(self.store.batch_is_exist, part))
            if error is not None:
                rest = [ResultCode.INTERNAL_ERROR.value] * (len(keys) - len(codes))
                return Answers([*codes, *rest], error)
            codes += _padded(found, len(part), 0)
        return Answers(codes, None)

    def put(self, batch: _core.TransferPlan) -> Answers:
        """Puts chunks; where the store gave no answer it is an internal error."""
        config = () if self.put_config is None else (self.put_config,)
        codes, error = self._call(
            Timing.PUT, lambda: self.store.batch_put_from_multi_buffers(batch.keys, batch.addrs, batch.sizes, *config)
        )
        return Answers(_padded(codes, len(batch), ResultCode.INTERNAL_ERROR.value), error)

    def get(self, batch: _core.TransferPlan) -> Answers:
        """Gets chunks; where the store gave no answer it is an internal error."""
        codes, error = self._call(
            Timing.GET, lambda: self.store.batch_get_into_multi_buffers(batch.keys, batch.addrs, batch.sizes)
        )
        return Answers(_padded(codes, len(batch), ResultCode.INTERNAL_ERROR.value), error)

    def _call(self, timing: Timing, call: Callable[[], Sequence[int]]) -> Answers:
        """Calls the store. What it raises is its word on these keys, and belongs into the result of the job."""
        try:
            with self.recorder.timed(timing):
                return Answers(list(call()), None)
        except Exception as error:
            logger.warning("the store raised in %s", timing.name.lower(), exc_info=True)
            return Answers([], error)


def _check_distinct(req_id: str, group_id: int, block_ids: Sequence[int]) -> None:
    """Refuses a block for two chunks: it can hold the bytes of one, and would pass for the other."""
    if len(set(block_ids)) < len(block_ids):
        block_id, times = Counter(block_ids).most_common(1)[0]
        raise LayoutError(
            f"request {req_id} has block {block_id} {times} times in the block table of group {group_id}: a block "
            "holds one chunk"
        )


class Answers(NamedTuple):
    """What the store said to one or more calls."""

    codes: list[int]
    error: Exception | None


def _padded(codes: Sequence[int], num_keys: int, missing: int) -> list[int]:
    return [*codes[:num_keys], *[missing] * (num_keys - len(codes))]


@dataclass(frozen=True)
class Work:
    """A plan over all groups.

    Attributes:
        plan: The chunks.
        group_ids: The group of each.
        channel: Where it goes.
        num_null_blocks: Chunks that were left out.
        has_hole: Whether one of them is of a full-attention group, which makes what follows it useless.
    """

    plan: _core.TransferPlan
    group_ids: tuple[int, ...]
    channel: Channel
    num_null_blocks: int
    has_hole: bool

    def chunk(self, index: int) -> tuple[int, int]:
        """Returns group and chunk id of a chunk of the plan."""
        group_id = self.group_ids[index]
        return group_id, self.plan.chunks[index][0] // self.channel.groups[group_id].group.block_size

    def num_bytes(self, indices: Sequence[int]) -> int:
        """Returns the bytes of the chunks at some indices."""
        counts = Counter(self.group_ids[index] for index in indices)
        return sum(self.channel.groups[group_id].row_bytes * count for group_id, count in counts.items())

    def num_addrs(self, indices: Sequence[int]) -> int:
        """Returns the addresses of the chunks at some indices."""
        counts = Counter(self.group_ids[index] for index in indices)
        return sum(self.channel.groups[group_id].num_regions * count for group_id, count in counts.items())


def registered_groups(keys: KeySpace, layout: KVGroupsLayout, num_blocks: int) -> tuple[RegisteredGroup, ...]:
    """Returns the groups of a pool with their memory."""
    groups = []
    for group_id, (group, database, regions) in enumerate(
        zip(keys.groups, keys.databases(), layout.regions, strict=True)
    ):
        database.set_regions(regions, num_blocks)
        registered = RegisteredGroup(
            group,
            database,
            put_step=keys.topology.put_step(group),
            put_step_rank=keys.topology.put_step_rank(group, group_id),
            row_bytes=sum(region.block_bytes for region in regions),
            num_regions=len(regions),
        )
        groups.append(registered)
    return tuple(groups)


def check_regions(layout: KVGroupsLayout, most: int | None) -> None:
    """Refuses chunks that the transport cannot take.

    Raises:
        LayoutError: A chunk has more regions than addresses may be in flight.
    """
    for group_id, regions in enumerate(layout.regions):
        if most is not None and len(regions) > most:
            raise LayoutError(
                f"a chunk of group {group_id} has {len(regions)} regions, but the transport takes {most} addresses at "
                "once: give tensors that hold several layers, or raise MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER before "
                "the client is made"
            )


def check_devices(layers: Sequence[Mapping[str, Tensor | Sequence[Tensor]]]) -> None:
    """Refuses memory outside the CPU's, for a library that would follow any address.

    Raises:
        StoreError: A tensor lies on another device.
    """
    for group in layers:
        for layer, value in group.items():
            tensors = [value] if hasattr(value, "device") else value
            if others := {str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"}:
                raise StoreError(
                    f"layer {layer!r} lies on {', '.join(sorted(others))}, which the installed Mooncake cannot move: "
                    "install the wheel for your CUDA version"
                )
