"""Pool keys: their frozen text, and keys as values."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncrate.data
import reference
from cases import RANKS, STRATEGIES, KeyCase, OrderCase, few_fields, made_up_hashes
from mooncrate.data import BlobBlockHashes, ChunkedTokenDatabase, KeyMetadata, PoolKey, chunk_hashes_for_block_size
from mooncrate.errors import AddressOverflowError

META = KeyMetadata("org/model", tp_rank=1, pcp_rank=2, dcp_rank=3, pp_rank=4, group_id=5)
PREFIX = "org/model@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5"


@given(STRATEGIES["key"])
def test_keys_agree_with_the_twin(case: KeyCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@given(STRATEGIES["order"])
def test_order_agrees_with_the_twin(case: OrderCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, PREFIX),
        ({"model_name": ""}, "@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5"),
        ({"cache_prefix": "prod"}, "prod@" + PREFIX),
        ({"cache_prefix": "@"}, "@@" + PREFIX),
        ({"model_name": "a@b"}, "a@b@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5"),
        ({"model_name": "模型\U0001f680"}, "模型\U0001f680@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5"),
        ({"cache_prefix": "x\0y"}, "x\0y@" + PREFIX),
        ({"tp_rank": -1}, "org/model@tp_rank:-1@pcp2@dcp3@pp_rank:4@group:5"),
        ({"group_id": 2**63 - 1}, "org/model@tp_rank:1@pcp2@dcp3@pp_rank:4@group:9223372036854775807"),
        ({"pp_rank": -(2**63)}, "org/model@tp_rank:1@pcp2@dcp3@pp_rank:-9223372036854775808@group:5"),
        ({"dcp_rank": np.int64(7)}, "org/model@tp_rank:1@pcp2@dcp7@pp_rank:4@group:5"),
        ({"dcp_rank": True}, "org/model@tp_rank:1@pcp2@dcp1@pp_rank:4@group:5"),
    ],
)
def test_frozen_prefixes(changes: dict[str, Any], prefix: str) -> None:
    metadata = dataclasses.replace(META, **changes)
    assert PoolKey.build_prefix(metadata) == prefix
    assert PoolKey(metadata, "00ff").to_string() == prefix + "@00ff"
    assert ChunkedTokenDatabase(metadata, 16).key_for(b"\x00\xff") == prefix + "@00ff"


@pytest.mark.parametrize("names", list(itertools.product([False, True], repeat=4)), ids=str)
def test_a_given_rank_replaces_the_one_of_the_metadata(names: tuple[bool, ...]) -> None:
    others = {rank: 7 + place for place, (rank, is_given) in enumerate(zip(RANKS, names, strict=True)) if is_given}
    assert PoolKey.build_prefix(META, **others) == PoolKey.build_prefix(dataclasses.replace(META, **cast(Any, others)))
    zeros = dict.fromkeys(others, 0)
    assert PoolKey.build_prefix(META, **zeros) == PoolKey.build_prefix(dataclasses.replace(META, **cast(Any, zeros)))
    nothing: dict[str, None] = dict.fromkeys(others)
    assert PoolKey.build_prefix(META, **nothing) == PREFIX


@pytest.mark.parametrize("surrogate", ["\ud800", "model\udfff", "\udc80x"])
def test_lone_surrogates_are_refused(surrogate: str) -> None:
    for changes in ({"model_name": surrogate}, {"cache_prefix": surrogate}):
        metadata = dataclasses.replace(META, **cast(Any, changes))
        for build in cast(
            list[Callable[[], object]],
            [
                lambda metadata=metadata: PoolKey.build_prefix(metadata),
                lambda metadata=metadata: PoolKey(metadata, "00").to_string(),
                lambda metadata=metadata: ChunkedTokenDatabase(metadata, 16),
            ],
        ):
            with pytest.raises(UnicodeEncodeError):
                build()
    with pytest.raises(UnicodeEncodeError):
        PoolKey.build_key_string("p", surrogate)
    with pytest.raises(UnicodeEncodeError):
        PoolKey.build_key_string(surrogate, "00")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_name": None}, TypeError),
        ({"cache_prefix": b"p"}, TypeError),
        ({"tp_rank": 1.0}, TypeError),
        ({"group_id": "0"}, TypeError),
        ({"pcp_rank": 2**63}, AddressOverflowError),
        ({"group_id": -(2**63) - 1}, AddressOverflowError),
    ],
)
def test_other_types_and_numbers_past_64_bits_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PoolKey.build_prefix(dataclasses.replace(META, **changes))


# Keys as values


def test_values() -> None:
    key = PoolKey(META, "00ff")
    assert key == PoolKey(dataclasses.replace(META), "00ff")
    assert key != dataclasses.replace(key, chunk_hash="00fe")
    assert key != dataclasses.replace(key, key_metadata=dataclasses.replace(META, group_id=0))
    assert cast(Any, key) != (META, "00ff")
    assert dataclasses.asdict(key) == {
        "key_metadata": {
            "model_name": "org/model",
            "tp_rank": 1,
            "pcp_rank": 2,
            "dcp_rank": 3,
            "pp_rank": 4,
            "group_id": 5,
            "cache_prefix": "",
        },
        "chunk_hash": "00ff",
    }


def test_equal_keys_hash_alike_and_as_documented() -> None:
    metadata = dataclasses.replace(META, cache_prefix="prod")
    key = PoolKey(metadata, "00ff")
    assert hash(key) == hash(("prod", "org/model", 1, 2, 3, 4, 5, "00ff"))
    assert {key: "found"}[PoolKey(dataclasses.replace(metadata), "00ff")] == "found"


def test_metadata_is_not_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(META)


fields = [field.name for field in dataclasses.fields(KeyMetadata)]


@pytest.mark.parametrize("name", fields)
def test_order_goes_field_by_field(name: str) -> None:
    value = getattr(META, name)
    low, high = META, dataclasses.replace(META, **cast(Any, {name: value + ("z" if isinstance(value, str) else 1)}))
    assert low < high
    assert PoolKey(low, "ff") < PoolKey(high, "00")
    assert PoolKey(low, "00") < PoolKey(low, "ff")


pool_keys = st.builds(
    lambda fields, chunk_hash: PoolKey(KeyMetadata(**fields), chunk_hash), few_fields, st.text("0f", max_size=1)
)


@given(pool_keys, pool_keys, pool_keys)
def test_the_order_is_total(a: PoolKey, b: PoolKey, c: PoolKey) -> None:
    assert [a < b, a == b, b < a].count(True) == 1
    assert (a <= b) == (a < b or a == b)
    assert (a > b) == (b < a)
    assert (a >= b) == (b <= a)
    if a <= b <= c:
        assert a <= c


@given(st.lists(pool_keys, max_size=8))
def test_sorting_is_stable_and_orders_as_tuples_do(keys: list[PoolKey]) -> None:
    in_order = sorted(keys)
    assert in_order == sorted(keys, key=lambda key: (dataclasses.astuple(key.key_metadata), key.chunk_hash))
    places = [[id(key) for key in some if key == one] for some in (keys, in_order) for one in in_order]
    assert places[: len(keys)] == places[len(keys) :]
    backwards = in_order[::-1]
    assert sorted(backwards) == in_order


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_other_types_have_no_place_in_the_order(compare: Callable[[Any, Any], bool]) -> None:
    with pytest.raises(TypeError):
        compare(PoolKey(META, "00"), "00")
    with pytest.raises(TypeError):
        compare(META, PoolKey(META, "00"))


# Keys of many chunks

WIDTHS = [0, 1, 16, 20, 32, 64]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_hashes", [0, 1, 2, 251])
def test_keys_for_is_a_loop_over_key_for(width: int, num_hashes: int) -> None:
    database = ChunkedTokenDatabase(META, 16)
    hashes = [bytes((index * 31 + place) % 256 for place in range(width)) for index in range(num_hashes)]
    expected = [PREFIX + "@" + one.hex() for one in hashes]
    assert [database.key_for(one) for one in hashes] == expected
    forms: list[Iterable[Any]] = [
        hashes,
        tuple(hashes),
        iter(hashes),
        (one for one in hashes),
        map(bytes, hashes),
        [memoryview(one) for one in hashes],
        [bytearray(one) for one in hashes],
        [one if index % 2 else memoryview(one) for index, one in enumerate(hashes)],
    ]
    if width:
        forms.append(BlobBlockHashes(b"".join(hashes) + bytes(width - 1), width))
        forms.append(BlobBlockHashes(np.frombuffer(b"".join(hashes), f"S{width}") if num_hashes else b"", width))
        pairs = [one for each in hashes for one in (b"first", each)]
        forms.append(chunk_hashes_for_block_size(pairs, 8, 16))
    for form in forms:
        keys = database.keys_for(form)
        assert type(keys) is list
        assert keys == expected
        assert {type(key) for key in keys} <= {str}


def test_keys_for_reads_only_the_hashes_of_a_blob_as_they_are_now() -> None:
    database = ChunkedTokenDatabase(META, 16)
    blob = bytearray(4)
    view = BlobBlockHashes(blob, 2)
    assert database.keys_for(view) == [PREFIX + "@0000", PREFIX + "@0000"]
    blob[2:] = b"\xab\xcd"
    assert database.keys_for(view) == [PREFIX + "@0000", PREFIX + "@abcd"]


@pytest.mark.parametrize("odd", [5, "00ff", None, [1]])
def test_what_has_no_hex_is_an_attribute_error(odd: Any) -> None:  # noqa: ANN401 - no hash
    database = ChunkedTokenDatabase(META, 16)
    with pytest.raises(AttributeError, match="hex"):
        database.key_for(odd)
    for form in ([b"\x00", odd], (odd,), iter([odd])):
        with pytest.raises(AttributeError, match="hex"):
            database.keys_for(form)


def test_errors_of_keys_for() -> None:
    database = ChunkedTokenDatabase(META, 16)
    with pytest.raises(TypeError):
        database.keys_for(5)  # type: ignore[arg-type]

    def broken() -> Iterable[bytes]:
        yield b"\x00"
        raise RuntimeError("no more hashes")

    with pytest.raises(RuntimeError, match="no more hashes"):
        database.keys_for(broken())


def test_the_prefix_is_that_of_the_metadata_when_the_database_was_made() -> None:
    metadata = dataclasses.replace(META)
    database = ChunkedTokenDatabase(metadata, 16)
    metadata.group_id = 0
    assert database.metadata is metadata
    assert database.key_for(b"\x00") == PREFIX + "@00"
    assert database.keys_for(made_up_hashes(1, 1)) == [PREFIX + "@00"]
