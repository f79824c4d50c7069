"""Errors of the core as Python exceptions: one kind each, with the numbers, also where asserts are compiled away."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mooncrate.errors
from mooncrate import LookupPlan, TransferPlan
from mooncrate.data import BlobBlockHashes, ChunkedTokenDatabase, KeyMetadata, chunk_hashes_for_block_size
from mooncrate.errors import AddressOverflowError, ConfigError, LayoutError, MooncrateError, StoreError
from mooncrate.groups import CacheGroup
from mooncrate.kv_caches import Region

ERROR_RS = Path(__file__).parents[1] / "rust" / "core" / "src" / "error.rs"


def database(block_size: int = 16, hash_block_size: int | None = None) -> ChunkedTokenDatabase:
    made = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), block_size, hash_block_size)
    made.set_kv_caches_base_addr([4_096])
    made.set_block_len([64])
    return made


def registered() -> ChunkedTokenDatabase:
    made = database()
    made.set_regions([Region(4_096, 64, 64)], num_blocks=3)
    return made


def of_memory(base_addr: int, block_len: list[int]) -> ChunkedTokenDatabase:
    made = database()
    made.set_kv_caches_base_addr([base_addr])
    made.set_block_len(block_len)
    return made


def plan(num_chunks: int) -> TransferPlan:
    hashes = [bytes([index]) for index in range(num_chunks)]
    return database().plan(16 * num_chunks, hashes, list(range(num_chunks)))


def lookup(*groups: tuple[list[str], CacheGroup]) -> LookupPlan:
    return LookupPlan(64, [b"0", b"1", b"2", b"3"], groups, 16)


def large_plans() -> TransferPlan:
    huge = of_memory(0, [2**62]).plan(32, [b"0", b"1"], [0, 0])
    return TransferPlan.concat([huge, huge, huge])


ERRORS: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "NotPositive": (LayoutError, "0 is not a block_size: at least 1 is needed", lambda: database(0)),
    "BlockNotMultiple": (
        LayoutError,
        "block_size (24) must be a multiple of hash_block_size (16)",
        lambda: database(24, 16),
    ),
    "TargetNotMultiple": (
        AssertionError,
        "target_block_size (24) is not a multiple of hash_block_size (16)",
        lambda: chunk_hashes_for_block_size([], 16, 24),
    ),
    "PutStep": (
        AssertionError,
        "put_step (0) must be greater than 0",
        lambda: list(database().process_tokens(16, [b""], put_step=0)),
    ),
    "PutStepRank": (
        LayoutError,
        "put_step_rank (4) is not in 0..4",
        lambda: list(database().process_tokens(16, [b""], put_step=4, put_step_rank=4)),
    ),
    "TokensNotAligned": (
        AssertionError,
        "token_len (17) is not a multiple of hash_block_size (16)",
        lambda: list(database().process_tokens(17, [b""])),
    ),
    "TooFewHashes": (
        AssertionError,
        "token_len (32) needs 2 block hashes of 16 tokens, got 1",
        lambda: list(database().process_tokens(32, [b""])),
    ),
    "SpanNotAligned": (
        AssertionError,
        "chunk 3..16 does not hold a whole number of 16-token hash blocks",
        lambda: database().prepare_values([(3, 16)], [0]),
    ),
    "ChunkRange": (
        LayoutError,
        "chunk -16..0 is not a range of tokens of the request",
        lambda: database().prepare_values([(-16, 0)], [0]),
    ),
    "HashLen": (LayoutError, "-5 is not a number of bytes per hash", lambda: BlobBlockHashes(b"", -5)),
    "NoBlockLen": (
        LayoutError,
        "block_len is empty but there are 1 regions",
        lambda: of_memory(4_096, []).prepare_value_for_block(0),
    ),
    "NegativeBlockId": (LayoutError, "block id -7 is negative", lambda: database().prepare_value_for_block(-7)),
    "BlockIdPastEnd": (
        LayoutError,
        "block id 3 is not below the 3 registered blocks",
        lambda: registered().prepare_value_for_block(3),
    ),
    "BlocksOverlap": (
        LayoutError,
        "region 1: blocks of 65 bytes overlap, 64 bytes apart",
        lambda: database().set_regions([Region(0, 65, 65), Region(4_096, 64, 65)], num_blocks=2),
    ),
    "BlocksApart": (
        LayoutError,
        "2 blocks of region 0 are not one run of bytes: they are 8192 bytes long, 10000 apart",
        lambda: _packed().prepare_values([(0, 32)], [0, 1]),
    ),
    "TooManyAnswers": (LayoutError, "3 answers to 2 keys", lambda: plan(2).missing([1, 1, 1])),
    "PlanOverflow": (
        AddressOverflowError,
        "the bytes of 6 chunks do not fit 64 bits",
        lambda: large_plans().num_bytes,
    ),
    "NoGroups": (LayoutError, "a lookup needs at least one KV cache group", lookup),
    "NoKeyPrefix": (
        LayoutError,
        "KV cache group 1 has no key prefix to look under",
        lambda: lookup((["p"], CacheGroup.full_attention(16)), ([], CacheGroup.full_attention(16))),
    ),
    "NoCommonMultiple": (
        LayoutError,
        "the block sizes of the KV cache groups have no common multiple below 2^63",
        lambda: lookup(*[(["p"], CacheGroup.full_attention(16 * factor)) for factor in (2**58 - 1, 2**57 - 1)]),
    ),
    "AddressOverflow": (
        AddressOverflowError,
        "block 2 of region 0 (base 0xffffffffffffff80, stride 64, 64 bytes) ends past the last 64-bit address",
        lambda: _high().prepare_value_for_block(2),
    ),
    "SizeOverflow": (
        AddressOverflowError,
        "4 blocks of 4611686018427387904 bytes do not fit 64 bits",
        lambda: of_memory(0, [2**62]).prepare_values([(0, 64)], [0]),
    ),
}
UNREACHABLE = {"TooManyChunks"}
"""Needs more chunks in a plan than 32 bits count."""


def _high() -> ChunkedTokenDatabase:
    made = database()
    made.set_regions([Region(2**64 - 128, 64, 64)], num_blocks=9)
    return made


def _packed() -> ChunkedTokenDatabase:
    made = database()
    made.set_regions([Region(4_096, 10_000, 8_192)], num_blocks=9)
    return made


@pytest.mark.parametrize("kind", ERRORS)
def test_each_kind_is_one_exception_with_its_numbers(kind: str) -> None:
    error, message, call = ERRORS[kind]
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message


def test_no_kind_is_forgotten() -> None:
    declaration = ERROR_RS.read_text().split("pub enum Error {")[1].split("\n}\n")[0]
    kinds = set(re.findall(r"^    (\w+)(?: \{|,)$", declaration, flags=re.MULTILINE))
    assert kinds == set(ERRORS) | UNREACHABLE


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (LayoutError, ValueError),
        (AddressOverflowError, OverflowError),
        (StoreError, RuntimeError),
        (ConfigError, ValueError),
    ],
)
def test_exceptions_are_also_builtin_ones(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, MooncrateError)
    assert error.__doc__
    assert error.__module__ == "mooncrate.errors"


def test_all_exceptions_have_one_base() -> None:
    found = [each for _, each in inspect.getmembers(mooncrate.errors, inspect.isclass)]
    assert len(found) >= 5
    assert all(issubclass(each, MooncrateError) for each in found)


OPTIMISED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_errors
assert False, "asserts are off"
raised = {}
for kind, (_, _, call) in test_errors.ERRORS.items():
    try:
        call()
    except Exception as error:
        raised[kind] = [type(error).__name__, str(error)]
print(json.dumps(raised))
"""


def test_checks_are_not_compiled_away() -> None:
    command = [sys.executable, "-O", "-c", OPTIMISED, str(Path(__file__).parent)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ran.stdout) == {kind: [error.__name__, message] for kind, (error, message, _) in ERRORS.items()}
