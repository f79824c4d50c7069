"""What a lookup costs at sizes that tests do not have: a cold prompt of a million tokens, and 64 prompts at once.

    python benches/lookup_cost.py

Both are about contracts, so it exits 1 when one does not hold: a cold prompt asks for one window of keys whatever its
length, and whoever asks is not blocked by a store that takes 20 ms per call.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from mooncrate import CacheGroup, KVPool, LookupPlan, RankTopology
from mooncrate.data import BlobBlockHashes

BLOCK_SIZE = 16
NUM_NAMESPACES = 8
NUM_PROMPTS = 64
STORE_SECONDS = 0.020


class SlowStore:
    """Has nothing, and takes 20 ms to say so."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """0 for every key."""
        time.sleep(STORE_SECONDS)
        return [0] * len(keys)


def cold_lookup(num_tokens: int, blob: bytes) -> tuple[int, float]:
    """Keys asked and milliseconds of a lookup that finds nothing, without the store."""
    prefixes = [f"m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0" for rank in range(NUM_NAMESPACES)]
    hashes = BlobBlockHashes(memoryview(blob)[: num_tokens // BLOCK_SIZE * 32], 32)
    start = time.perf_counter()
    lookup = LookupPlan(num_tokens, hashes, [(prefixes, CacheGroup.full_attention(BLOCK_SIZE))], BLOCK_SIZE)
    while keys := lookup.next_keys():
        lookup.feed([0] * len(keys))
    return lookup.num_keys_asked, (time.perf_counter() - start) * 1e3


def waiting_prompts(store: Any) -> tuple[float, float]:  # noqa: ANN401 - a store of one call
    """Milliseconds that the caller spends asking for 64 different prompts, and until all answers are there."""
    topology = RankTopology(tp_size=NUM_NAMESPACES)
    with KVPool.open(
        model_name="m", groups=[CacheGroup.full_attention(BLOCK_SIZE)], topology=topology, store=store
    ) as pool:
        prompts = [BlobBlockHashes(bytes([number]) * (32_768 // BLOCK_SIZE * 32), 32) for number in range(NUM_PROMPTS)]
        start = time.perf_counter()
        futures = [pool.lookup_async(32_768, prompt) for prompt in prompts]
        asked = time.perf_counter()
        hits = [future.result() for future in futures]
        answered = time.perf_counter()
    if any(hits):
        raise AssertionError(f"{hits} tokens found in a store that has nothing")
    return (asked - start) * 1e3, (answered - start) * 1e3


def main() -> int:
    """Print both; 1 when a contract does not hold."""
    blob = bytes(1_000_000 // BLOCK_SIZE * 32)
    is_good = True
    print(f"cold lookup over {NUM_NAMESPACES} namespaces, medians of 15")
    for num_tokens in (8_192, 131_072, 1_000_000):
        pairs = [cold_lookup(num_tokens, blob) for _ in range(15)]
        num_keys, ms = pairs[0][0], statistics.median(ms for _, ms in pairs)
        is_good &= num_keys <= 512
        print(f"  {num_tokens:>9,} tokens: {num_keys} keys, {ms:.3f} ms")
    asking_ms, answered_ms = waiting_prompts(SlowStore())
    is_good &= asking_ms < NUM_PROMPTS * STORE_SECONDS * 1e3 / 10
    print(f"{NUM_PROMPTS} waiting prompts of 32,768 tokens, a store that takes {STORE_SECONDS * 1e3:g} ms per call")
    print(f"  the caller was busy for {asking_ms:.1f} ms; all answers after {answered_ms:.0f} ms")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
