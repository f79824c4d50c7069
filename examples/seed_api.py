"""The seed API against a real store: save a prompt, find it, load it into other blocks, compare every byte.

What `mooncrate.KVPool` does in three calls, spelled out with the calls of the reference API: chunks, keys, existence,
addresses, put and get. Run it with ``python examples/seed_api.py``; it starts and stops a store of its own.
"""

from __future__ import annotations

import hashlib

import torch

from mooncrate import StoreConfig
from mooncrate.data import ChunkedTokenDatabase, KeyMetadata

NUM_TOKENS = 1024
BLOCK_SIZE = 16
NUM_LAYERS = 64
BLOCK_BYTES = 4096
NUM_BLOCKS = 160
MAX_ADDRS = 2048
"""Addresses in one call: what the store takes over TCP, where nothing was done to raise it."""


def chained_hashes() -> list[bytes]:
    """One hash per block of the prompt, each over its tokens and the hash before it."""
    hashes, parent = [], b""
    for start in range(0, NUM_TOKENS, BLOCK_SIZE):
        parent = hashlib.sha256(parent + repr(list(range(start, start + BLOCK_SIZE))).encode()).digest()
        hashes.append(parent)
    return hashes


def main() -> None:
    """Save from `source`, load into `target`."""
    num_chunks = NUM_TOKENS // BLOCK_SIZE
    source_blocks = list(range(1, 1 + num_chunks))
    target_blocks = [block_id * 2 + 1 for block_id in range(num_chunks)]
    source = torch.arange(NUM_LAYERS * NUM_BLOCKS * BLOCK_BYTES) % 251
    source = source.to(torch.uint8).view(NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES)
    target = torch.zeros_like(source)

    database = ChunkedTokenDatabase(KeyMetadata("example", 0, 0, 0, 0), BLOCK_SIZE)
    database.set_block_len([BLOCK_BYTES])
    batch = MAX_ADDRS // NUM_LAYERS
    with StoreConfig.embedded(global_segment_size="256MiB").connect() as store:
        for cache in (source, target):
            if store.register_buffer(cache.data_ptr(), cache.nbytes) != 0:
                raise SystemExit("the store refuses the memory")

        chunks = list(database.process_tokens(NUM_TOKENS, chained_hashes()))
        keys = database.keys_for([chunk_hash for _, _, chunk_hash in chunks])

        database.set_kv_caches_base_addr([layer.data_ptr() for layer in source])
        missing = [index for index, there in enumerate(store.batch_is_exist(keys)) if there != 1]
        addrs, sizes, _ = database.prepare_values([chunks[index] for index in missing], source_blocks)
        for start in range(0, len(missing), batch):
            part = slice(start, start + batch)
            codes = store.batch_put_from_multi_buffers([keys[i] for i in missing[part]], addrs[part], sizes[part])
            if any(codes):
                raise SystemExit(f"not saved: {codes}")
        print(f"saved {len(missing)} chunks")

        database.set_kv_caches_base_addr([layer.data_ptr() for layer in target])
        found = store.batch_is_exist(keys)
        num_found = next((index for index, there in enumerate(found) if there != 1), len(found))
        addrs, sizes, _ = database.prepare_values(chunks[:num_found], target_blocks)
        for start in range(0, num_found, batch):
            part = slice(start, start + batch)
            answers = store.batch_get_into_multi_buffers(keys[:num_found][part], addrs[part], sizes[part])
            if answers != [sum(row) for row in sizes[part]]:
                raise SystemExit(f"not loaded: {answers}")
        print(f"loaded {num_found} chunks")

    if not torch.equal(target[:, target_blocks], source[:, source_blocks]):
        raise SystemExit("a byte is wrong")
    print("verified every byte")


if __name__ == "__main__":
    main()
