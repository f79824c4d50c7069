"""`LookupPlan` as Python sees it; what it finds and asks is proven in `rust/core/tests/lookup.rs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mooncrate import CacheGroup, LookupPlan
from mooncrate.data import BlobBlockHashes
from mooncrate.errors import LayoutError

FULL = CacheGroup.full_attention(16)


def make_hashes(num_hashes: int) -> list[bytes]:
    return [index.to_bytes(4, "big") for index in range(num_hashes)]


def play(lookup: LookupPlan, pool: set[str]) -> list[list[str]]:
    """Answer from a pool; returns the keys of each call."""
    calls = []
    while keys := lookup.next_keys():
        calls.append(keys)
        lookup.feed([int(key in pool) for key in keys])
    return calls


class Recording(Sequence[bytes]):
    """A million hashes, made when asked for."""

    def __init__(self, num_hashes: int) -> None:
        self.num_hashes = num_hashes
        self.touched: set[int] = set()

    def __len__(self) -> int:
        return self.num_hashes

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - both forms of a sequence
        self.touched.add(index)
        return index.to_bytes(4, "big")


@pytest.mark.parametrize("form", ["list", "blob", "tuple", "views"])
def test_hashes_come_in_any_form(form: str) -> None:
    hashes = make_hashes(64)
    given: Any = {
        "list": hashes,
        "blob": BlobBlockHashes(b"".join(hashes), 4),
        "tuple": tuple(hashes),
        "views": [memoryview(chunk_hash) for chunk_hash in hashes],
    }[form]
    pool = {f"{prefix}@{chunk_hash.hex()}" for prefix in "ab" for chunk_hash in hashes[:40]}
    lookup = LookupPlan(1024, given, [(["a", "b"], FULL)], 16)
    calls = play(lookup, pool)
    assert calls == [
        [f"a@{chunk_hash.hex()}" for chunk_hash in hashes[:63]],
        [f"b@{chunk_hash.hex()}" for chunk_hash in hashes[:40]],
    ]
    assert (lookup.num_hit_tokens, lookup.num_keys_asked) == (640, 103)
    assert lookup.next_keys() == []


@pytest.mark.parametrize("num_tokens", [8_192, 131_072, 1_000_000])
def test_a_cold_prompt_asks_one_window_and_touches_no_other_hash(num_tokens: int) -> None:
    hashes = Recording(num_tokens // 16)
    lookup = LookupPlan(num_tokens, hashes, [([f"rank{rank}" for rank in range(8)], FULL)], 16)
    assert [len(keys) for keys in play(lookup, set())] == [256]
    assert hashes.touched == set(range(256))
    assert (lookup.num_hit_tokens, lookup.num_keys_asked) == (0, 256)


@pytest.mark.parametrize("answers", [[1, 1, -1, 1], [1, 1, 0, 1], [1, 1], [1, 1, -900], [True, True, False]])
def test_errors_and_short_answers_count_as_absent(answers: list[int]) -> None:
    lookup = LookupPlan(65, make_hashes(4), [(["a"], FULL)], 16)
    assert len(lookup.next_keys()) == 4
    lookup.feed(answers)
    assert (lookup.next_keys(), lookup.num_hit_tokens) == ([], 32)


def test_asking_twice_gives_the_same_keys_and_counts_them_once() -> None:
    lookup = LookupPlan(65, make_hashes(4), [(["a"], FULL)], 16)
    assert lookup.next_keys() == lookup.next_keys()
    assert lookup.num_keys_asked == 4
    assert lookup.num_hit_tokens == 0, "no answer before there is one"


def test_too_many_answers_are_refused_and_change_nothing() -> None:
    lookup = LookupPlan(65, make_hashes(4), [(["a"], FULL)], 16)
    with pytest.raises(LayoutError, match="5 answers to 4 keys"):
        lookup.feed([1] * 5)
    lookup.feed([1] * 4)
    assert lookup.num_hit_tokens == 64


def test_groups_of_other_block_sizes_meet_at_a_common_multiple() -> None:
    hashes = make_hashes(24)
    groups = [(["full"], CacheGroup.full_attention(16)), (["window"], CacheGroup.sliding_window(24, 49))]
    pool = {f"full@{chunk_hash.hex()}" for chunk_hash in hashes} | {
        f"window@{chunk_hash.hex()}" for chunk_hash in hashes
    }
    lookup = LookupPlan(193, hashes, groups, 8)
    play(lookup, pool)
    assert lookup.num_hit_tokens == 192
    # The window at 192 tokens reaches into chunks 6 and 7 of 24 tokens; without chunk 6 the hit ends before it.
    lookup = LookupPlan(193, hashes, groups, 8)
    play(lookup, pool - {f"window@{hashes[20].hex()}"})
    assert lookup.num_hit_tokens == 144


@pytest.mark.parametrize(
    ("groups", "hash_block_size", "message"),
    [
        ([], 16, "at least one KV cache group"),
        ([([], FULL)], 16, "KV cache group 0 has no key prefix"),
        ([(["a"], FULL)], 12, r"block_size \(16\) must be a multiple of hash_block_size \(12\)"),
        ([(["a"], FULL)], 0, "0 is not a hash_block_size"),
    ],
)
def test_what_makes_no_sense_is_refused(groups: Any, hash_block_size: int, message: str) -> None:  # noqa: ANN401
    with pytest.raises(LayoutError, match=message):
        LookupPlan(64, make_hashes(4), groups, hash_block_size)


def test_hashes_that_are_no_bytes_are_a_type_error() -> None:
    hashes: Any = [1, 2, 3]
    with pytest.raises(TypeError):
        LookupPlan(48, hashes, [(["a"], FULL)], 16).next_keys()
