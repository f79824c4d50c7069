"""Times ``mooncrate.data`` against the data module of vLLM's Mooncake store connector, in one process.

The two take turns, so that a machine that gets slower gets slower for both; what counts is the ratio of the medians.
Every answer is compared before it is timed. Run it with ``make bench``, or with vLLM 0.27.1 on ``PYTHONPATH``:

    python benches/compare_reference.py [--json FILE] [--rounds N]

It exits 1 when a row is below its bar.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mooncrate.data as ours
from mooncrate import LookupPlan
from mooncrate.groups import CacheGroup
from reference_worker import FixedStore, ReferenceLookup, load

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 131_072
BLOCK_SIZE = 16
NUM_REGIONS = 64
BLOCK_BYTES = 65_536
HASH_LEN = 32
NUM_NAMESPACES = 8
MIN_ROUNDS = 7


@dataclass
class Row:
    """One line of the table: medians in milliseconds and the ratio between them."""

    name: str
    reference_ms: float
    ours_ms: float
    ratio: float
    bar: float | None

    @property
    def is_met(self) -> bool:
        """Whether the ratio reaches its bar, where there is one."""
        return self.bar is None or self.ratio >= self.bar


def make_database(module: Any) -> Any:  # noqa: ANN401 - the same calls on both modules are the point
    """A database with addresses as an engine has them."""
    database = module.ChunkedTokenDatabase(module.KeyMetadata("meta-llama/Llama-3.1-8B", 0, 0, 0, 0), BLOCK_SIZE)
    database.set_kv_caches_base_addr([0x7F00_0000_0000 + (region << 32) for region in range(NUM_REGIONS)])
    database.set_block_len([BLOCK_BYTES] * NUM_REGIONS)
    return database


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call, with the garbage collector running as in any program."""
    start = time.perf_counter()
    answer = call()
    elapsed = time.perf_counter() - start
    del answer
    return elapsed * 1e3


def compare(
    name: str, reference: Callable[[], object], own: Callable[[], object], rounds: int, bar: float | None = None
) -> Row:
    """Time two calls that must give the same answer, in turns."""
    if reference() != own():
        sys.exit(f"compare_reference: {name}: the answers differ, so their times mean nothing")
    return measure(name, reference, own, rounds, bar)


def measure(
    name: str, reference: Callable[[], object], own: Callable[[], object], rounds: int, bar: float | None = None
) -> Row:
    """Time two calls in turns."""
    pairs = [(timed(reference), timed(own)) for _ in range(rounds)]
    reference_ms, ours_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Row(name, reference_ms, ours_ms, reference_ms / ours_ms, bar)


def exhaust(iterable: Any) -> None:  # noqa: ANN401
    """Run an iterator to its end without keeping anything."""
    deque(iterable, maxlen=0)


class Prompt:
    """One prompt, as both modules are given it."""

    def __init__(self) -> None:
        """Hashes, chunks and block table of a prompt of `NUM_TOKENS` tokens."""
        self.num_chunks = NUM_TOKENS // BLOCK_SIZE
        self.blob = bytes(i % 251 for i in range(self.num_chunks * HASH_LEN))
        self.hashes = [self.blob[i * HASH_LEN : (i + 1) * HASH_LEN] for i in range(self.num_chunks)]
        self.chunks = [(start, start + BLOCK_SIZE) for start in range(0, NUM_TOKENS, BLOCK_SIZE)]
        self.block_ids = list(range(100, 100 + self.num_chunks))


def seed_api_rows(prompt: Prompt, rounds: int) -> list[Row]:
    """The calls that both modules have."""
    theirs = load("data")
    database, own = make_database(theirs), make_database(ours)
    chunks, hashes, block_ids = prompt.chunks, prompt.hashes, prompt.block_ids
    view, own_view = (module.BlobBlockHashes(memoryview(prompt.blob), HASH_LEN) for module in (theirs, ours))
    for given, own_given in ((hashes, hashes), (view, own_view)):
        if list(database.process_tokens(NUM_TOKENS, given)) != list(own.process_tokens(NUM_TOKENS, own_given)):
            sys.exit("compare_reference: process_tokens: the answers differ, so their times mean nothing")
    return [
        compare(
            "prepare_values",
            lambda: database.prepare_values(chunks, block_ids),
            lambda: own.prepare_values(chunks, block_ids),
            rounds,
            bar=2.5,
        ),
        compare(
            "process_tokens, exhausted",
            lambda: exhaust(database.process_tokens(NUM_TOKENS, hashes)),
            lambda: exhaust(own.process_tokens(NUM_TOKENS, hashes)),
            rounds,
            bar=2.0,
        ),
        compare(
            "process_tokens over a blob, exhausted",
            lambda: exhaust(database.process_tokens(NUM_TOKENS, view)),
            lambda: exhaust(own.process_tokens(NUM_TOKENS, own_view)),
            rounds,
        ),
        compare(
            "keys_for / loop over key_for",
            lambda: [database.key_for(chunk_hash) for chunk_hash in hashes],
            lambda: own.keys_for(hashes),
            rounds,
            bar=2.0,
        ),
        compare(
            "keys_for a blob / loop over key_for",
            lambda: [database.key_for(chunk_hash) for chunk_hash in view],
            lambda: own.keys_for(own_view),
            rounds,
        ),
        compare(
            "key_for, one at a time",
            lambda: [database.key_for(chunk_hash) for chunk_hash in hashes],
            lambda: [own.key_for(chunk_hash) for chunk_hash in hashes],
            rounds,
        ),
        compare(
            "prepare_value, one at a time, 64 chunks",
            lambda: [database.prepare_value(start, end, block_ids) for start, end in chunks[:64]],
            lambda: [own.prepare_value(start, end, block_ids) for start, end in chunks[:64]],
            rounds,
        ),
    ]


def reference_save_plan(database: Any, prompt: Prompt) -> tuple[Any, ...]:  # noqa: ANN401
    """What vLLM's worker computes for a save of everything, with vLLM's functions: chunks, keys, rows, byte count."""
    starts, ends, keys = [], [], []
    for start, end, chunk_hash in database.process_tokens(NUM_TOKENS, prompt.hashes):
        starts.append(start)
        ends.append(end)
        keys.append(database.key_for(chunk_hash))
    chunks = list(zip(starts, ends, strict=True))
    addrs, sizes, block_ids = database.prepare_values(chunks, prompt.block_ids)
    return keys, addrs, sizes, block_ids, chunks, load("worker")._sum_batch_bytes(sizes)


def own_save_plan(database: ours.ChunkedTokenDatabase, prompt: Prompt) -> tuple[Any, ...]:
    """The same from one plan, all attributes read."""
    plan = database.plan(NUM_TOKENS, prompt.hashes, prompt.block_ids)
    if plan.hashes is None:
        raise AssertionError("read for its cost")
    return plan.keys, plan.addrs, plan.sizes, plan.block_ids, plan.chunks, plan.num_bytes


def plan_rows(prompt: Prompt, rounds: int) -> list[Row]:
    """The plan of a save, with rows prepared and on first use, in time and in memory."""
    database, own = make_database(load("data")), make_database(ours)
    keys, addrs, sizes, *rest = reference_save_plan(database, prompt)
    expected = (keys, [tuple(row) for row in addrs], [tuple(row) for row in sizes], *rest)
    if own_save_plan(own, prompt) != expected:
        sys.exit("compare_reference: save plan: the answers differ, so their times mean nothing")

    def first_use() -> object:
        own.row_cache_bytes = own.row_cache_bytes  # drops every row, as registering again does
        return own_save_plan(own, prompt)

    def reference() -> object:
        return reference_save_plan(database, prompt)

    first = measure("save plan, first use", reference, first_use, rounds, bar=2.0)
    warm = measure("save plan, rows prepared", reference, lambda: own_save_plan(own, prompt), rounds, bar=40.0)
    reference_peak, own_peak = peak_mb(reference), peak_mb(lambda: own_save_plan(own, prompt))
    peak = Row("peak memory of a warm plan, MB", reference_peak, own_peak, reference_peak / own_peak, 4.0)
    return [warm, first, peak]


def peak_mb(call: Callable[[], object]) -> float:
    """The most memory that Python's allocators held for a call, in MB; Rust's own (100 bytes a chunk) is not in it."""
    gc.collect()
    tracemalloc.start()
    answer = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del answer
    return peak / 1e6


def own_lookup(prompt: Prompt, key_prefixes: list[str], store: FixedStore) -> int:
    """Tokens that `LookupPlan` finds."""
    lookup = LookupPlan(NUM_TOKENS, prompt.hashes, [(key_prefixes, CacheGroup.full_attention(BLOCK_SIZE))], BLOCK_SIZE)
    while keys := lookup.next_keys():
        lookup.feed(store.batch_is_exist(keys))
    return lookup.num_hit_tokens


def lookup_row(name: str, prompt: Prompt, rounds: int, *, is_full: bool, bar: float) -> Row:
    """The work around the store calls of a lookup over `NUM_NAMESPACES` rank namespaces."""
    theirs = load("data")
    metadata = theirs.KeyMetadata("meta-llama/Llama-3.1-8B", 0, 0, 0, 0)
    key_prefixes = [theirs.PoolKey.build_prefix(metadata, tp_rank=rank) for rank in range(NUM_NAMESPACES)]
    store = FixedStore(is_full)
    reference = ReferenceLookup(make_database(theirs), key_prefixes, store)
    return compare(
        name,
        lambda: reference(NUM_TOKENS, prompt.hashes),
        lambda: own_lookup(prompt, key_prefixes, store),
        rounds,
        bar,
    )


def run(rounds: int) -> list[Row]:
    """All rows of the table."""
    prompt = Prompt()
    return [
        *seed_api_rows(prompt, rounds),
        *plan_rows(prompt, rounds),
        lookup_row("lookup, full hit, 8 namespaces", prompt, rounds, is_full=True, bar=2.5),
        lookup_row("lookup, cold, 8 namespaces", prompt, rounds, is_full=False, bar=100),
    ]


def main() -> int:
    """Print the table; 1 when a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help=f"timed pairs per row, at least {MIN_ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {args.rounds}: a median of fewer than {MIN_ROUNDS} says little")
    rows = run(args.rounds)
    print(
        f"{NUM_TOKENS:,} tokens, block {BLOCK_SIZE}, {NUM_REGIONS} regions; medians of {args.rounds}, ms where not said"
    )
    print(f"{'':40} {'reference':>10} {'ours':>8} {'ratio':>7} {'at least':>9}")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:9.1f}{'' if row.is_met else '  NOT MET'}"
        print(f"{row.name:40} {row.reference_ms:10.2f} {row.ours_ms:8.2f} {row.ratio:7.2f} {bar}")
    if args.json:
        record = {
            "num_tokens": NUM_TOKENS,
            "block_size": BLOCK_SIZE,
            "num_regions": NUM_REGIONS,
            "rounds": args.rounds,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": [{**asdict(row), "is_met": row.is_met} for row in rows],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
