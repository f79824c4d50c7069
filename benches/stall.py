"""How long another Python thread is kept waiting while a whole prompt is saved to a store that does nothing.

An engine's scheduler, its tokenizer and its server threads share the interpreter with the thread that saves. A thread
that wakes up every half millisecond measures how late it comes; what counts is the longest wait of a save, with vLLM's
own sending thread and with `KVPool`. Run it with ``make bench``, or with vLLM 0.27.1 on ``PYTHONPATH``:

    python benches/stall.py [--rounds N]

It exits 1 when ours is more than a third of the reference's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from compare_reference import BLOCK_SIZE, NUM_REGIONS, NUM_TOKENS, Prompt
from mooncrate import CacheGroup, KVPool
from mooncrate.data import ReqMeta
from reference_worker import FixedStore, load, make_coordinator

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BLOCKS = 100 + NUM_TOKENS // BLOCK_SIZE
BLOCK_WORDS = 16
TICK_SECONDS = 0.0005
BAR = 3.0


class Ticker:
    """A thread that wants to run every half millisecond, and knows how long it once had to wait."""

    def __init__(self) -> None:
        """Start ticking."""
        self._stop = threading.Event()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._stop.is_set():
            time.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.longest = max(self.longest, now - last - TICK_SECONDS)
            last = now

    def longest_wait_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds that the ticker had to wait at most while some work was done."""
        self._thread.start()
        work()
        self._stop.set()
        self._thread.join()
        return self.longest * 1e3


def make_reference_save(prompt: Prompt) -> Callable[[], object]:
    """Start vLLM's sending thread; the call gives it one request and waits."""
    worker, data = load("worker"), load("data")
    coordinator, _ = make_coordinator(BLOCK_SIZE)
    database = data.ChunkedTokenDatabase(data.KeyMetadata("meta-llama/Llama-3.1-8B", 0, 0, 0, 0), BLOCK_SIZE)
    database.set_kv_caches_base_addr([0x7F00_0000_0000 + (region << 32) for region in range(NUM_REGIONS)])
    database.set_block_len([BLOCK_WORDS * 4] * NUM_REGIONS)
    ready = threading.Event()
    store = FixedStore(is_full=False)
    thread = worker.KVCacheStoreSendingThread(store, coordinator, [database], BLOCK_SIZE, 0, [1], "kv_both", ready)
    thread.start()
    ready.wait()

    def save() -> None:
        thread.add_stored_request("request")
        thread.add_request(data.ReqMeta("request", NUM_TOKENS, (prompt.block_ids,), prompt.hashes, can_save=True))
        thread.request_queue.join()
        thread.delete_finished_stored_request("request")

    save()
    if store.num_keys != 2 * prompt.num_chunks:
        sys.exit(f"stall: vLLM's thread asked and put {store.num_keys} keys, not {2 * prompt.num_chunks}")
    return save


def make_own_save(prompt: Prompt) -> tuple[KVPool, Callable[[], object]]:
    """A pool, and a save through it."""
    store: Any = FixedStore(is_full=False)  # the calls of a save, and no others
    pool = KVPool.open(
        model_name="meta-llama/Llama-3.1-8B", groups=[CacheGroup.full_attention(BLOCK_SIZE)], store=store
    )
    layers = {f"layer{i}": torch.zeros(NUM_BLOCKS, BLOCK_WORDS, dtype=torch.int32) for i in range(NUM_REGIONS)}
    pool.register_kv_caches(layers, NUM_BLOCKS, block_dim=0)

    def save() -> None:
        result = pool.save(ReqMeta("request", NUM_TOKENS, (prompt.block_ids,), prompt.hashes)).result()
        if result.num_saved != prompt.num_chunks:
            raise AssertionError(f"{result} of {prompt.num_chunks} chunks")

    return pool, save


def main() -> int:
    """Print both medians and their ratio; 1 when the bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="saves of each")
    args = parser.parse_args()
    prompt = Prompt()
    reference = make_reference_save(prompt)
    pool, own = make_own_save(prompt)
    with pool:
        pairs = [(Ticker().longest_wait_ms(reference), Ticker().longest_wait_ms(own)) for _ in range(args.rounds)]
    reference_ms, own_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = reference_ms / own_ms
    print(f"longest wait of another thread while {prompt.num_chunks:,} chunks x {NUM_REGIONS} regions are saved,")
    print(
        f"medians of {args.rounds}, in ms: reference {reference_ms:.1f}, ours {own_ms:.1f}, ratio {ratio:.1f}", end=""
    )
    print("" if ratio >= BAR else f", NOT the {BAR:g} that it should be")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
