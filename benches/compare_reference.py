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
from collections import deque
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mooncrate.data as ours

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 131_072
BLOCK_SIZE = 16
NUM_REGIONS = 64
BLOCK_BYTES = 65_536
HASH_LEN = 32
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


def load_reference() -> Any:  # noqa: ANN401 - vLLM is not typed, and not installed where types are checked
    """Import vLLM's module; a missing or other vLLM ends the program with one line."""
    try:
        return import_module("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")
    except ImportError as error:
        sys.exit(f"compare_reference: no vLLM with a Mooncake connector to compare with ({error}); use `make bench`")


def make_database(module: Any) -> Any:  # noqa: ANN401 - the same calls on both modules are the point
    """A database with addresses as an engine has them."""
    database = module.ChunkedTokenDatabase(module.KeyMetadata("meta-llama/Llama-3.1-8B", 0, 0, 0, 0), BLOCK_SIZE)
    database.set_kv_caches_base_addr([0x7F00_0000_0000 + (region << 32) for region in range(NUM_REGIONS)])
    database.set_block_len([BLOCK_BYTES] * NUM_REGIONS)
    return database


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call, including what it leaves for the garbage collector's next young collection."""
    gc.collect()
    start = time.perf_counter()
    answer = call()
    gc.collect(0)
    elapsed = time.perf_counter() - start
    del answer
    return elapsed * 1e3


def compare(
    name: str, reference: Callable[[], object], own: Callable[[], object], rounds: int, bar: float | None = None
) -> Row:
    """Time two calls that must give the same answer, in turns."""
    if reference() != own():
        sys.exit(f"compare_reference: {name}: the answers differ, so their times mean nothing")
    pairs = [(timed(reference), timed(own)) for _ in range(rounds)]
    reference_ms, ours_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Row(name, reference_ms, ours_ms, reference_ms / ours_ms, bar)


def exhaust(iterable: Any) -> None:  # noqa: ANN401
    """Run an iterator to its end without keeping anything."""
    deque(iterable, maxlen=0)


def run(rounds: int) -> list[Row]:
    """All rows of the table."""
    theirs = load_reference()
    database, own = make_database(theirs), make_database(ours)
    num_chunks = NUM_TOKENS // BLOCK_SIZE
    blob = bytes(i % 251 for i in range(num_chunks * HASH_LEN))
    hashes = [blob[i * HASH_LEN : (i + 1) * HASH_LEN] for i in range(num_chunks)]
    view, own_view = theirs.BlobBlockHashes(memoryview(blob), HASH_LEN), ours.BlobBlockHashes(blob, HASH_LEN)
    chunks = [(start, end) for start, end, _ in database.process_tokens(NUM_TOKENS, hashes)]
    block_ids = list(range(100, 100 + num_chunks))
    if list(database.process_tokens(NUM_TOKENS, view)) != list(own.process_tokens(NUM_TOKENS, own_view)):
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


def main() -> int:
    """Print the table; 1 when a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help=f"timed pairs per row, at least {MIN_ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {args.rounds}: a median of fewer than {MIN_ROUNDS} says little")
    rows = run(args.rounds)
    print(f"{NUM_TOKENS:,} tokens, block {BLOCK_SIZE}, {NUM_REGIONS} regions; medians of {args.rounds}, in ms")
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
