"""A naive twin of `mooncrate.data`: what each answer is, by counting and looping over Python integers.

It is slow and plain on purpose, and kept for ever: the Rust core has to agree with it, and so has the data module of
vLLM's connector, except for the differences that the docstring of `mooncrate.data` lists. Those are built in here, so
this twin is the whole truth about `mooncrate.data`.

Every hash is copied out at once, every chunk of a request is visited, every number is checked for its range by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

from mooncrate.errors import AddressOverflowError, LayoutError

type_of_hash = bytes | memoryview


def signed(value: SupportsIndex) -> int:
    """An integer that fits signed 64 bits."""
    number = operator.index(value)
    if number < -(2**63) or number >= 2**63:
        raise AddressOverflowError(f"{number} does not fit signed 64 bits")
    return int(number)


def unsigned(value: SupportsIndex) -> int:
    """An integer that fits unsigned 64 bits."""
    number = operator.index(value)
    if number < 0 or number >= 2**64:
        raise AddressOverflowError(f"{number} does not fit unsigned 64 bits")
    return int(number)


def at_least_one(value: int) -> int:
    """A size."""
    if value < 1:
        raise LayoutError(f"{value} is not a size")
    return value


class BlobBlockHashes(Sequence[memoryview]):
    """Cuts a buffer into hashes, one after the other, while a whole one is left."""

    def __init__(self, blob: Any, hash_len: SupportsIndex) -> None:  # noqa: ANN401 - any buffer
        width = signed(hash_len)
        buffer = memoryview(blob)
        if not buffer.c_contiguous:
            raise LayoutError("not contiguous")
        if width < 0:
            raise LayoutError(f"{width} is not a width")
        rest = buffer.tobytes()
        self._hashes: list[memoryview] = []
        while width and len(rest) >= width:
            self._hashes.append(memoryview(rest[:width]))
            rest = rest[width:]

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        return self._hashes[index]


class _CompactChunkHashList(Sequence[type_of_hash]):
    """Deals hashes out into chunks, and keeps the last one of each full chunk."""

    def __init__(
        self, block_hashes: Sequence[type_of_hash], hash_block_size: SupportsIndex, target_block_size: SupportsIndex
    ) -> None:
        hashed, target = signed(hash_block_size), signed(target_block_size)
        at_least_one(hashed)
        if target % hashed:
            raise AssertionError(f"{target} is not a multiple of {hashed}")
        at_least_one(target)
        self.block_hashes = block_hashes
        self.scale_factor = target // hashed

    def _last_of_chunks(self) -> list[int]:
        """Where the last hash of each full chunk is."""
        last = []
        for index in range(len(self.block_hashes)):
            hashes_so_far = index + 1
            if hashes_so_far % self.scale_factor == 0:
                last.append(index)
        return last

    def __len__(self) -> int:
        return len(self._last_of_chunks())

    @overload
    def __getitem__(self, index: int) -> type_of_hash: ...
    @overload
    def __getitem__(self, index: slice) -> list[type_of_hash]: ...
    def __getitem__(self, index: int | slice) -> type_of_hash | list[type_of_hash]:
        found = self._last_of_chunks()[index]
        return [self.block_hashes[one] for one in found] if isinstance(found, list) else self.block_hashes[found]


def chunk_hashes_for_block_size(
    block_hashes: Sequence[type_of_hash], hash_block_size: SupportsIndex, block_size: SupportsIndex
) -> Sequence[type_of_hash]:
    """The hashes themselves where every one is a chunk."""
    if hash_block_size == block_size:
        return block_hashes
    return _CompactChunkHashList(block_hashes, hash_block_size, block_size)


@dataclass(order=True)
class KeyMetadata:
    """The fields of a key, in their order."""

    model_name: str
    tp_rank: int
    pcp_rank: int
    dcp_rank: int
    pp_rank: int
    group_id: int = 0
    cache_prefix: str = ""


def text(value: str) -> str:
    """Text that a store takes: UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value.encode().decode()


@dataclass(order=True)
class PoolKey:
    """A key as a value."""

    key_metadata: KeyMetadata
    chunk_hash: str

    def __hash__(self) -> int:
        meta = self.key_metadata
        ranks = (meta.tp_rank, meta.pcp_rank, meta.dcp_rank, meta.pp_rank)
        return hash((meta.cache_prefix, meta.model_name, *ranks, meta.group_id, self.chunk_hash))

    @staticmethod
    def build_prefix(
        key_metadata: KeyMetadata,
        *,
        tp_rank: int | None = None,
        pcp_rank: int | None = None,
        dcp_rank: int | None = None,
        pp_rank: int | None = None,
    ) -> str:
        """What all keys of a rank begin with."""
        own = [key_metadata.tp_rank, key_metadata.pcp_rank, key_metadata.dcp_rank, key_metadata.pp_rank]
        other = [tp_rank, pcp_rank, dcp_rank, pp_rank]
        parts = [text(key_metadata.cache_prefix)] if text(key_metadata.cache_prefix) else []
        parts.append(text(key_metadata.model_name))
        for label, mine, theirs in zip(["tp_rank:", "pcp", "dcp", "pp_rank:"], own, other, strict=True):
            parts.append(label + str(signed(mine if theirs is None else theirs)))
        parts.append("group:" + str(signed(key_metadata.group_id)))
        return "@".join(parts)

    @staticmethod
    def build_key_string(key_prefix: str, chunk_hash: str) -> str:
        """A key from its two halves."""
        return text(key_prefix) + "@" + text(chunk_hash)

    def to_string(self) -> str:
        """The text of the key."""
        return self.build_key_string(self.build_prefix(self.key_metadata), self.chunk_hash)


class ChunkedTokenDatabase:
    """Chunks, keys and addresses of one KV cache group."""

    def __init__(
        self, metadata: KeyMetadata, block_size: SupportsIndex, hash_block_size: SupportsIndex | None = None
    ) -> None:
        self.metadata = metadata
        sizes = [signed(block_size), signed(hash_block_size or block_size)]
        self.block_size, self.hash_block_size = at_least_one(sizes[0]), at_least_one(sizes[1])
        if self.block_size % self.hash_block_size:
            raise LayoutError(f"{self.block_size} is not a multiple of {self.hash_block_size}")
        self.key_prefix = PoolKey.build_prefix(metadata)
        self.kv_caches_base_addr: list[int] = []
        self.block_len: list[int] = []

    def set_kv_caches_base_addr(self, kv_caches_base_addr: Iterable[int]) -> None:
        """Where regions begin."""
        self.kv_caches_base_addr = list(kv_caches_base_addr)

    def set_block_len(self, block_len: Iterable[int]) -> None:
        """How long blocks are."""
        self.block_len = list(block_len)

    def key_for(self, chunk_hash: type_of_hash) -> str:
        """The key of a hash."""
        return PoolKey.build_key_string(self.key_prefix, chunk_hash.hex())

    def _regions(self) -> list[tuple[int, int]]:
        """Base and block length of each region."""
        bases = [unsigned(base) for base in self.kv_caches_base_addr]
        lengths = [unsigned(length) for length in self.block_len]
        if bases and not lengths:
            raise LayoutError(f"{len(bases)} regions without a block length")
        while len(lengths) < len(bases):
            lengths = lengths + lengths
        return list(zip(bases, lengths, strict=False))

    @staticmethod
    def _row(regions: list[tuple[int, int]], block_id: int, num_blocks: int) -> tuple[list[int], list[int]]:
        """Address and size of `num_blocks` blocks in each region."""
        if block_id < 0:
            raise LayoutError(f"block {block_id}")
        addrs, sizes = [], []
        for base, length in regions:
            size = unsigned(length * num_blocks)
            addr = unsigned(base + block_id * length)
            if size:
                unsigned(addr + size - 1)
            addrs.append(addr)
            sizes.append(size)
        return addrs, sizes

    def prepare_value_for_block(self, block_id: SupportsIndex) -> tuple[list[int], list[int]]:
        """Where a block lies."""
        regions = self._regions()
        return self._row(regions, signed(block_id), 1)

    def prepare_value(self, start: int, end: int, block_ids: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Where a chunk lies."""
        addrs, sizes, chunk_block_ids = self.prepare_values([(start, end)], block_ids)
        return addrs[0], sizes[0], chunk_block_ids[0]

    def prepare_values(
        self, chunks: Sequence[Sequence[int]], block_ids: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Where chunks lie."""
        if not chunks:
            return [], [], []
        regions = self._regions()
        spans = []
        for chunk in chunks:
            start, end = signed(chunk[0]), signed(chunk[1])
            length = end - start
            if length < -(2**63) or length >= 2**63 or length % self.hash_block_size:
                raise AssertionError(f"{start}..{end} is not in hash blocks")
            spans.append((start, end))
        rows: tuple[list[list[int]], list[list[int]], list[int]] = ([], [], [])
        for start, end in spans:
            if start < 0 or end < start:
                raise LayoutError(f"{start}..{end} is not a range")
            block_id = signed(block_ids[start // self.block_size])
            full_blocks, rest = divmod(end - start, self.block_size)
            num_blocks = full_blocks + 1 if rest else full_blocks
            addrs, sizes = self._row(regions, block_id, num_blocks)
            rows[0].append(addrs)
            rows[1].append(sizes)
            rows[2].append(block_id)
        return rows

    def process_tokens(
        self,
        token_len: SupportsIndex,
        block_hashes: Sequence[type_of_hash],
        mask_num: SupportsIndex = 0,
        *,
        chunk_mask: Sequence[bool] | None = None,
        put_step: SupportsIndex = 1,
        put_step_rank: SupportsIndex = 0,
    ) -> Iterator[tuple[int, int, type_of_hash]]:
        """The chunks of one rank, found by looking at every chunk."""
        tokens, masked, step, rank = signed(token_len), signed(mask_num), signed(put_step), signed(put_step_rank)
        if step < 1:
            raise AssertionError(f"step {step}")
        if rank < 0 or rank >= step:
            raise LayoutError(f"rank {rank} of {step}")
        if not block_hashes:
            return
        if tokens % self.hash_block_size:
            raise AssertionError(f"{tokens} tokens are not in hash blocks")
        if tokens > len(block_hashes) * self.hash_block_size:
            raise AssertionError(f"{tokens} tokens have {len(block_hashes)} hashes")
        mask = None if chunk_mask is None else iter(chunk_mask[i] for i in range(len(chunk_mask)))
        start = chunk_id = 0
        while start < tokens:
            end = min(start + self.block_size, tokens)
            if start >= masked:
                try:
                    wanted = True if mask is None else bool(next(mask))
                except StopIteration:
                    return
                if wanted and chunk_id % step == rank:
                    yield start, end, block_hashes[end // self.hash_block_size - 1]
            start, chunk_id = start + self.block_size, chunk_id + 1


@dataclass
class LoadSpec:
    """What could be loaded."""

    vllm_cached_tokens: int
    kvpool_cached_tokens: int
    can_load: bool
    token_len: int = 0


@dataclass
class RequestTracker:
    """A request as the scheduler sees it."""

    req_id: str
    token_len: int
    allocated_block_ids: tuple[list[int], ...]
    num_saved_tokens: int = 0
    token_ids: list[int] | None = None
    has_pending_offload: bool = False
    prefill_end_tokens: int = 0

    def reset(self) -> None:
        """Back to the start, with no group."""
        fresh = RequestTracker(self.req_id, 0, ())
        vars(self).update(vars(fresh))

    def update(self, new_block_ids: tuple[list[int], ...] | list[int]) -> None:
        """More blocks for each group."""
        groups = [new_block_ids] if isinstance(new_block_ids, list) else list(new_block_ids)
        if len(groups) != len(self.allocated_block_ids):
            raise ValueError(f"{len(groups)} groups, not {len(self.allocated_block_ids)}")
        for group, blocks in enumerate(groups):
            for block_id in blocks or []:
                self.allocated_block_ids[group].append(block_id)


@dataclass
class ReqMeta:
    """What is told about a request."""

    req_id: str
    token_len_chunk: int
    block_ids: tuple[list[int], ...]
    block_hashes: Sequence[bytes]
    can_save: bool | None = None
    load_spec: LoadSpec | None = None
    is_last_chunk: bool | None = None
    current_event: Any = None
    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    partial_tail_offloads: list[tuple[int, int, int]] | None = None

    @staticmethod
    def from_request_tracker(
        tracker: RequestTracker,
        block_size: int,
        load_spec: LoadSpec | None = None,
        skip_save: bool | None = False,
        block_hashes: Sequence[bytes] | None = None,
        is_last_chunk: bool | None = None,
    ) -> ReqMeta | None:
        """Save blocks that got full since the last save, unless something is loaded or saving is off."""
        full_tokens = 0
        while full_tokens + block_size <= tracker.token_len:
            full_tokens += block_size
        # Before the tokens saved so far, some block may be half saved; it is not saved again.
        started_blocks = 0
        while (started_blocks + 1) * block_size <= tracker.num_saved_tokens:
            started_blocks += 1
        has_new_block = full_tokens > started_blocks * block_size
        loads = load_spec is not None and bool(load_spec.can_load)
        saves = has_new_block and not skip_save and not loads
        if saves:
            tracker.num_saved_tokens = full_tokens
        elif load_spec is None:
            return None
        return ReqMeta(
            req_id=tracker.req_id,
            token_len_chunk=full_tokens,
            block_ids=tuple([*blocks] for blocks in tracker.allocated_block_ids),
            block_hashes=[] if block_hashes is None else block_hashes,
            can_save=saves,
            load_spec=load_spec if loads else None,
            is_last_chunk=is_last_chunk,
            token_ids=[*tracker.token_ids] if tracker.token_ids else None,
            num_prompt_tokens=tracker.prefill_end_tokens,
        )


class MooncakeStoreConnectorMetadata:
    """What is told in one step."""

    def __init__(self, unfinished_request_ids: Iterable[str], preempted_req_ids: Iterable[str]) -> None:
        self.requests: list[ReqMeta] = []
        self.unfinished_request_ids = {*unfinished_request_ids}
        self.preempted_req_ids = {*preempted_req_ids}

    def add_request(self, req_meta: ReqMeta) -> None:
        """One more request."""
        self.requests.append(req_meta)
