"""The store data layer: block hashes, pool keys, chunks of a request and where their bytes lie.

The names, signatures and results are those of the data module of vLLM's Mooncake store connector (0.27.1), so code
written against it runs on this one. The arithmetic and the text are Rust (``mooncrate._core``).

Differences from the reference, each with its reason:

========================================================  =============================================================
here                                                      why
========================================================  =============================================================
a bare ``assert`` is an ``AssertionError`` with numbers,  a failed check says what to look at, and is never compiled
also under ``python -O``                                  away
a chunk that starts below 0 or ends before its start, or  the reference reads another block, or sizes below 0, without
a negative block id: ``LayoutError`` (``ValueError``)     a word
regions without ``block_len``: ``LayoutError``            the reference divides by zero
sizes below 1 for blocks and hashes, a negative           the reference divides by zero later, or gives lengths below 0
``hash_len``: ``LayoutError`` when the object is made
a ``put_step_rank`` outside ``0..put_step``:              nobody would save the chunks of that rank, and nothing would
``LayoutError``                                           say so
an address or size past 64 bits: ``AddressOverflowError`` a wrapped address moves somebody else's bytes
(``OverflowError``); so is any number past 64 bits
addresses are unsigned: 2**63 and above work, below 0 is  the reference converts to signed 64-bit: it fails above, and
an ``AddressOverflowError``                               takes what lies below
``PoolKey`` and ``KeyMetadata`` have a total order        the reference raises ``TypeError`` between different metadata
``BlobBlockHashes`` reads any contiguous buffer as bytes  with ``bytes`` the reference copies each hash, and it counts
and gives ``memoryview`` items; a strided one:            items where the buffer has wider ones; a strided buffer has
``LayoutError``; anything else: ``TypeError``             no flat hashes
``_CompactChunkHashList`` counts negative indexes from    the reference gives the hash of a ragged tail, which names no
its own end                                               chunk
both views take any integer type as an index, and what    the reference takes some: a numpy integer or a float past the
is no integer is a ``TypeError``                          end is one error or another
both views are final, and cannot be changed or copied,    they are fixed when made, so that no check is ever repeated
nor referred to weakly
a database cannot be pickled or copied; a subclass has    its addresses mean nothing elsewhere; there is state behind it
to call ``super().__init__``
``process_tokens`` gives an iterator that is no           a call at a time, and hashes are asked one by one either way
generator: no ``close``, and a second ``next`` while one
runs is a ``RuntimeError``
what has a length or a ``hex`` of its own is not asked:   the usual types are read directly
a generator of chunks is taken, ``bytes`` are bytes
``ReqMeta.block_ids`` and ``token_ids``, and the sets of  the reference shares them with the scheduler, whose later
``MooncakeStoreConnectorMetadata``, are snapshots         changes reach requests in flight
``kv_caches_base_addr`` and ``block_len`` are snapshots;  addresses in use do not change under a running transfer
reading them gives a new list
``block_size`` and ``hash_block_size`` are read-only      keys and addresses of one database belong to one grid
a name with lone surrogates: ``UnicodeEncodeError``       the store could not take such a key
names and the parts of a key have to be ``str``; ranks    the reference prints whatever it is given into the key, and
and groups, tokens, block ids and addresses integers      cuts off the fraction of an address
numbers in results are ``int``, and a bool rank prints    numpy and bool types reach results and keys of the reference
as one
``MooncakeStoreConnectorMetadata`` has no base class      the reference's is vLLM's
========================================================  =============================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mooncrate import _core
from mooncrate._core import BlobBlockHashes, _CompactChunkHashList, chunk_hashes_for_block_size
from mooncrate.errors import LayoutError
from mooncrate.requests import LoadSpec, MooncakeStoreConnectorMetadata, ReqMeta, RequestTracker

if TYPE_CHECKING:
    from mooncrate.kv_caches import Region

__all__ = [
    "BlobBlockHashes",
    "ChunkedTokenDatabase",
    "KeyMetadata",
    "LoadSpec",
    "MooncakeStoreConnectorMetadata",
    "PoolKey",
    "ReqMeta",
    "RequestTracker",
    "_CompactChunkHashList",
    "chunk_hashes_for_block_size",
]

DEFAULT_ROW_CACHE_BYTES = 256 * 2**20
"""Memory for rows of addresses kept per block, in bytes: 100,000 blocks of 64 regions."""

Sequence.register(BlobBlockHashes)
Sequence.register(_CompactChunkHashList)


@dataclass(order=True)
class KeyMetadata:
    """What identifies the bytes of one rank and KV cache group, apart from the chunk hash.

    Attributes:
        model_name: Name of the model.
        tp_rank: Tensor-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
        dcp_rank: Decode-context-parallel rank.
        pp_rank: Pipeline-parallel rank.
        group_id: KV cache group.
        cache_prefix: Namespace in front of every key, so that deployments can share one pool; left out when empty.
    """

    model_name: str
    tp_rank: int
    pcp_rank: int
    dcp_rank: int
    pp_rank: int
    group_id: int = 0
    cache_prefix: str = ""


@dataclass(order=True)
class PoolKey:
    """The key of one chunk in the pool.

    Attributes:
        key_metadata: Whose bytes they are.
        chunk_hash: Hash of the chunk, in hex.
    """

    key_metadata: KeyMetadata
    chunk_hash: str

    def __hash__(self) -> int:
        """Hash of all fields: keys that are equal hash alike."""
        meta = self.key_metadata
        return hash(
            (
                meta.cache_prefix,
                meta.model_name,
                meta.tp_rank,
                meta.pcp_rank,
                meta.dcp_rank,
                meta.pp_rank,
                meta.group_id,
                self.chunk_hash,
            )
        )

    @staticmethod
    def build_prefix(
        key_metadata: KeyMetadata,
        *,
        tp_rank: int | None = None,
        pcp_rank: int | None = None,
        dcp_rank: int | None = None,
        pp_rank: int | None = None,
    ) -> str:
        """Build what the keys of one rank and group begin with.

        Args:
            key_metadata: Whose bytes they are.
            tp_rank: Replaces the rank of ``key_metadata``, as do the others: the keys of another rank.
            pcp_rank: See ``tp_rank``.
            dcp_rank: See ``tp_rank``.
            pp_rank: See ``tp_rank``.

        Returns:
            Text without a trailing separator.
        """
        return _core.build_prefix(
            key_metadata.cache_prefix,
            key_metadata.model_name,
            key_metadata.tp_rank if tp_rank is None else tp_rank,
            key_metadata.pcp_rank if pcp_rank is None else pcp_rank,
            key_metadata.dcp_rank if dcp_rank is None else dcp_rank,
            key_metadata.pp_rank if pp_rank is None else pp_rank,
            key_metadata.group_id,
        )

    @staticmethod
    def build_key_string(key_prefix: str, chunk_hash: str) -> str:
        """Build a key from its prefix and the hex text of a chunk hash."""
        return _core.build_key_string(key_prefix, chunk_hash)

    def to_string(self) -> str:
        """Build the text of this key."""
        return self.build_key_string(self.build_prefix(self.key_metadata), self.chunk_hash)


@dataclass(frozen=True)
class _Memory:
    """Where blocks lie, as it was said: base addresses with block lengths, or regions with a number of blocks."""

    base_addr: tuple[int, ...] = ()
    block_len: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()
    num_blocks: int | None = None
    row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES

    def table(self) -> _core.RegionTable:
        if self.num_blocks is None:
            return _core.RegionTable(self.base_addr, self.block_len, self.row_cache_bytes)
        return _core.RegionTable.from_regions(self.regions, self.num_blocks, self.row_cache_bytes)


class ChunkedTokenDatabase:
    """Maps the tokens of a request to pool keys and to the addresses of its blocks, for one KV cache group.

    Args:
        metadata: Whose bytes the keys name.
        block_size: Tokens per block, which is also one chunk.
        hash_block_size: Tokens per block hash; ``block_size`` when not given.

    Raises:
        LayoutError: A size is below 1, or ``block_size`` is not a multiple of ``hash_block_size``.
    """

    def __init__(self, metadata: KeyMetadata, block_size: int, hash_block_size: int | None = None) -> None:
        """See the class."""
        self.metadata = metadata
        self._block_size = block_size
        self._hash_block_size = hash_block_size or block_size
        self._grid = _core.ChunkGrid(self._block_size, self._hash_block_size)
        self._key_prefix = PoolKey.build_prefix(metadata)
        self._memory = _Memory()
        # The table and what it was made from: a table that somebody else's setter made stale is not used.
        self._table: tuple[_Memory, _core.RegionTable] | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""
        return self._hash_block_size

    @property
    def kv_caches_base_addr(self) -> list[int]:
        """Address of block 0 in each region."""
        return list(self._memory.base_addr)

    @kv_caches_base_addr.setter
    def kv_caches_base_addr(self, kv_caches_base_addr: Iterable[int]) -> None:
        self._memory = replace(self._memory, base_addr=tuple(kv_caches_base_addr), regions=(), num_blocks=None)

    @property
    def block_len(self) -> list[int]:
        """Bytes of a block in each region, which is also the distance between blocks; repeats over the regions."""
        return list(self._memory.block_len)

    @block_len.setter
    def block_len(self, block_len: Iterable[int]) -> None:
        self._memory = replace(self._memory, block_len=tuple(block_len), regions=(), num_blocks=None)

    @property
    def row_cache_bytes(self) -> int:
        """Memory for rows of addresses kept per block, in bytes; the least recently used rows go first."""
        return self._memory.row_cache_bytes

    @row_cache_bytes.setter
    def row_cache_bytes(self, row_cache_bytes: int) -> None:
        if not 0 <= row_cache_bytes < 2**63:
            raise LayoutError(f"row_cache_bytes {row_cache_bytes} is not a number of bytes")
        self._memory = replace(self._memory, row_cache_bytes=row_cache_bytes)

    def set_kv_caches_base_addr(self, kv_caches_base_addr: list[int]) -> None:
        """Set the address of block 0 in each region (unsigned 64-bit)."""
        self.kv_caches_base_addr = kv_caches_base_addr

    def set_block_len(self, block_len: list[int]) -> None:
        """Set the bytes of a block in each region; a list shorter than the regions repeats."""
        self.block_len = block_len

    def set_regions(self, regions: Iterable[Region], num_blocks: int) -> None:
        """Set base, stride and bytes of each region apart, and how many blocks there are.

        From then on block ids are checked against ``num_blocks``. Rows of addresses made before are dropped. Setting
        base addresses or block lengths afterwards replaces all of this: block lengths are strides again, and the
        number of blocks is not known.

        Raises:
            AddressOverflowError: A number is not unsigned 64-bit.
            LayoutError: Blocks of a region overlap.
        """
        regions = tuple(regions)
        memory = _Memory(
            tuple(region.base_addr for region in regions),
            tuple(region.block_bytes for region in regions),
            regions,
            num_blocks,
            self._memory.row_cache_bytes,
        )
        self._table = (memory, memory.table())
        self._memory = memory

    def key_for(self, chunk_hash: bytes | memoryview) -> str:
        """Build the key of one chunk hash, of any width.

        Raises:
            AttributeError: The hash is not bytes and has no ``hex`` method.
        """
        return _core.key_for(self._key_prefix, chunk_hash)

    def keys_for(self, chunk_hashes: Iterable[bytes | memoryview]) -> list[str]:
        """Build the keys of many chunk hashes in one call: what a loop over ``key_for`` gives."""
        return _core.keys_for(self._key_prefix, chunk_hashes)

    def prepare_value(self, start: int, end: int, block_ids: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Compute where the bytes of one chunk lie: ``prepare_values`` for tokens ``start..end``.

        Returns:
            Addresses and sizes, one per region, and the block id.
        """
        addrs, sizes, chunk_block_ids = self.prepare_values(((start, end),), block_ids)
        return addrs[0], sizes[0], chunk_block_ids[0]

    def prepare_values(
        self, chunks: Sequence[tuple[int, int] | tuple[int, int, object]], block_ids: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Compute where the bytes of many chunks lie.

        Args:
            chunks: ``(token_start, token_end)`` of each chunk; further items of a tuple are ignored.
            block_ids: The request's block table: entry ``i`` holds tokens from ``i * block_size`` on.

        Returns:
            Addresses (one list per chunk, one entry per region), sizes in bytes (the same shape), block ids.

        Raises:
            AssertionError: A chunk does not hold a whole number of hash blocks.
            IndexError: The block table is too short.
            LayoutError: A chunk starts below 0 or ends before its start, a block id is negative, or there are regions
                but no ``block_len``; a chunk of several blocks where other bytes lie between them.
            AddressOverflowError: A block would end past the last 64-bit address.
        """
        if not chunks:
            return [], [], []
        return self._region_table().prepare_values(self._grid, chunks, block_ids)

    def prepare_value_for_block(self, block_id: int) -> tuple[list[int], list[int]]:
        """Compute addresses and sizes of one block, one entry per region.

        Raises:
            LayoutError: The id is negative, or there are regions but no ``block_len``.
            AddressOverflowError: The block would end past the last 64-bit address.
        """
        return self._region_table().prepare_value_for_block(block_id)

    def process_tokens(
        self,
        token_len: int,
        block_hashes: Sequence[bytes | memoryview],
        mask_num: int = 0,
        *,
        chunk_mask: Sequence[bool] | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
    ) -> Iterator[tuple[int, int, bytes | memoryview]]:
        """Iterate over the chunks of a request that this rank handles.

        Chunks are dealt out by ``chunk_id % put_step``, by the absolute id, so that a chunk lands on the same rank
        wherever the processed suffix begins. Nothing is checked before the first item is asked for.

        Args:
            token_len: Tokens of the request, in whole hash blocks.
            block_hashes: One hash per ``hash_block_size`` tokens; a chunk is named by the last one inside it. Hashes
                of chunks that are not yielded are not touched. Empty: no chunks.
            mask_num: Tokens to leave out at the front, rounded up to whole chunks.
            chunk_mask: For each chunk after ``mask_num`` whether to yield it; chunks past its end are left out.
            put_step: Ranks that share the chunks.
            put_step_rank: The rank whose chunks are wanted.

        Returns:
            Iterator over ``(token_start, token_end, chunk_hash)``.

        Raises:
            AssertionError: ``put_step`` is below 1, ``token_len`` is not in whole hash blocks, or there are fewer
                hashes than it needs.
            LayoutError: ``put_step_rank`` is not in ``0..put_step``.
        """
        return self._grid.process_tokens(token_len, block_hashes, mask_num, chunk_mask, put_step, put_step_rank)

    def plan(
        self,
        token_len: int,
        block_hashes: Sequence[bytes | memoryview],
        block_ids: Sequence[int],
        mask_num: int = 0,
        *,
        chunk_mask: Sequence[bool] | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
        null_block_id: int | None = None,
    ) -> _core.TransferPlan:
        """Plan a request in one call: the chunks that ``process_tokens`` gives, resolved to keys and rows.

        Args:
            token_len: See ``process_tokens``, as for the other arguments that it has.
            block_hashes: Read when the plan is made, without a Python call per chunk for a ``BlobBlockHashes`` and a
                list of bytes.
            block_ids: The request's block table: entry ``i`` holds tokens from ``i * block_size`` on.
            mask_num: See ``process_tokens``.
            chunk_mask: See ``process_tokens``.
            put_step: See ``process_tokens``.
            put_step_rank: See ``process_tokens``.
            null_block_id: Chunks in this block are left out and counted: it holds nothing of the request.

        Returns:
            A plan whose lists are made when they are read.

        Raises:
            AssertionError: As ``process_tokens``.
            IndexError: The block table is too short.
            LayoutError: As ``process_tokens``; or a block id is negative, or not below the number of registered blocks,
                where that is known.
            AddressOverflowError: A block would end past the last 64-bit address.
        """
        return _core.plan(
            self._key_prefix,
            self._grid,
            self._region_table(),
            token_len,
            block_hashes,
            block_ids,
            mask_num,
            chunk_mask,
            put_step,
            put_step_rank,
            null_block_id,
        )

    def _region_table(self) -> _core.RegionTable:
        memory, made = self._memory, self._table
        if made is None or made[0] is not memory:
            made = self._table = (memory, memory.table())
        return made[1]
