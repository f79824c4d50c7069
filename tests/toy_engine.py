"""An engine without a model: paged KV cache in torch tensors, whose every byte follows from the hash of its chunk."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from mooncrate import CacheGroup, KVPool
from mooncrate.data import LoadSpec, ReqMeta
from mooncrate.store_faults import Gate

PERIOD = 251
"""Prime, so that no power of two falls on the same byte: swapped blocks show."""
EMPTY = 0xEE
NULL_BLOCK_ID = 0


def prompt(name: str, num_hashes: int) -> list[bytes]:
    """Returns the chained hashes of a prompt: those of a longer prompt of the same name begin with them."""
    hashes, parent = [], name.encode()
    for _ in range(num_hashes):
        parent = hashlib.sha256(parent).digest()
        hashes.append(parent)
    return hashes


def pattern(chunk_hash: bytes, group_id: int, layer: int, num_bytes: int) -> torch.Tensor:
    """Returns what a block holds in one layer: ``(a * i + b) % 251`` with a and b from the hash."""
    digest = hashlib.sha256(chunk_hash + bytes([group_id, layer])).digest()
    a, b = 1 + digest[0] % (PERIOD - 1), digest[1] % PERIOD
    return ((a * torch.arange(num_bytes) + b) % PERIOD).to(torch.uint8)


class ToyEngine:
    """Block tables and tensors of an engine; it tells a `KVPool` what to do and checks every byte."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        hash_block_size: int | None = None,
        num_blocks: int = 32,
        num_layers: int = 2,
        block_bytes: int = 96,
    ) -> None:
        """Makes a cache in which every byte is `EMPTY`."""
        self.groups = tuple(groups)
        self.hash_block_size = hash_block_size or min(group.block_size for group in groups)
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.caches: list[Mapping[str, torch.Tensor]] = [
            {
                f"group {group_id} layer {layer}": torch.full((num_blocks, block_bytes), EMPTY, dtype=torch.uint8)
                for layer in range(num_layers)
            }
            for group_id in range(len(groups))
        ]

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk of one group."""
        return self.block_bytes * len(self.caches[0])

    def register(self, pool: KVPool) -> None:
        """Registers the cache."""
        pool.register_kv_caches(self.caches, self.num_blocks)

    def compute(self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> None:
        """Fills the blocks of a prompt, as a prefill does."""
        for group_id, chunk_hash, block_id in self._chunks(hashes, block_ids):
            for layer, tensor in enumerate(self.caches[group_id].values()):
                tensor[block_id] = pattern(chunk_hash, group_id, layer, self.block_bytes)

    def wipe(self) -> None:
        """Empties the whole cache."""
        for cache in self.caches:
            for tensor in cache.values():
                tensor.fill_(EMPTY)

    def holds(self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], group_id: int, chunk_id: int) -> bool:
        """Tells whether a block holds the bytes of its chunk, in every layer."""
        size = self.groups[group_id].block_size
        chunk_hash = hashes[(chunk_id + 1) * size // self.hash_block_size - 1]
        block_id = block_ids[group_id][chunk_id]
        return all(
            torch.equal(tensor[block_id], pattern(chunk_hash, group_id, layer, self.block_bytes))
            for layer, tensor in enumerate(self.caches[group_id].values())
        )

    def is_empty(self, group_id: int, block_id: int) -> bool:
        """Tells whether nothing was ever written to a block."""
        return all(bool((tensor[block_id] == EMPTY).all()) for tensor in self.caches[group_id].values())

    def object_bytes(self, chunk_hash: bytes, group_id: int = 0) -> bytes:
        """Returns what the pool should hold for a chunk."""
        layers = range(len(self.caches[group_id]))
        parts = [pattern(chunk_hash, group_id, layer, self.block_bytes) for layer in layers]
        return bytes(torch.cat(parts).tolist())

    def _chunks(self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> list[tuple[int, bytes, int]]:
        """Returns group, hash and block of every whole chunk that is in a real block."""
        chunks = []
        for group_id, (group, ids) in enumerate(zip(self.groups, block_ids, strict=True)):
            scale = group.block_size // self.hash_block_size
            chunks += [
                (group_id, hashes[(chunk_id + 1) * scale - 1], ids[chunk_id])
                for chunk_id in range(min(len(hashes) // scale, len(ids)))
                if ids[chunk_id] != NULL_BLOCK_ID
            ]
        return chunks


class Waiting:
    """A device event that is reached, and then waits to be let go."""

    def __init__(self) -> None:
        """Makes an event whose gate is closed."""
        self.gate = Gate()

    def synchronize(self) -> None:
        """Waits for the gate."""
        self.gate.hold()


def to_save(
    hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], num_tokens: int, req_id: str = "request"
) -> ReqMeta:
    """Returns what a save is asked for."""
    return ReqMeta(req_id, num_tokens, tuple(map(list, block_ids)), hashes, can_save=True)


def to_load(
    hashes: Sequence[bytes],
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
    num_cached_tokens: int = 0,
    req_id: str = "request",
) -> ReqMeta:
    """Returns what a load is asked for."""
    spec = LoadSpec(num_cached_tokens, num_tokens, can_load=True)
    return ReqMeta(req_id, num_tokens, tuple(map(list, block_ids)), hashes, can_save=False, load_spec=spec)
