"""`mooncrate.data` against the module that is its reference, on the same inputs.

Results, their types, exceptions and the hashes that were touched are equal, except where the docstring of
`mooncrate.data` lists a difference. `cases.py` says which inputs those are, input by input; there the naive twin, which
has the listed differences built in, says what must come out. So nothing is left unchecked, and a difference that nobody
listed fails.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cases
import mooncrate.data
import reference as twin
from cases import STRATEGIES
from outcome import outcome
from test_vectors import vectors

pytestmark = pytest.mark.vllm_version("0.27.1")

NUM_EXAMPLES = max(2_000, settings.default.max_examples if settings.default else 0)


@pytest.fixture(scope="module")
def reference() -> Any:  # noqa: ANN401 - vLLM's module
    """The reference; imported when its version is there."""
    return import_module("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_no_difference_but_the_listed_ones(reference: Any, kind: str) -> None:  # noqa: ANN401
    """Example by example: as the reference, or as the twin where a difference is listed."""

    @settings(max_examples=NUM_EXAMPLES)
    @given(STRATEGIES[kind])
    def compare(case: Any) -> None:  # noqa: ANN401 - one of `cases`
        expected = case.run(twin if case.difference() else reference)
        assert case.run(mooncrate.data) == expected

    compare()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_most_examples_are_about_no_difference(kind: str) -> None:
    """A predicate that is true of everything would hide the reference."""
    seen: list[str | None] = []

    @settings(max_examples=300)
    @given(STRATEGIES[kind])
    def collect(case: Any) -> None:  # noqa: ANN401 - one of `cases`
        seen.append(case.difference())

    collect()
    assert seen.count(None) > len(seen) / 2


MEMORY = ([4_096], [64])
BIG = 2**63
FIELDS = {
    "model_name": "m",
    "tp_rank": 0,
    "pcp_rank": 0,
    "dcp_rank": 0,
    "pp_rank": 0,
    "group_id": 0,
    "cache_prefix": "",
}
LISTED: dict[str, list[Any]] = {
    cases.RANGE: [
        cases.AddressCase(MEMORY, [(-16, 0)], [1], 4),
        cases.AddressCase(MEMORY, [(16, 0)], [1, 2], 4),
        cases.AddressCase(MEMORY, [(0, 16)], [-1], 4),
        cases.BlockCase(MEMORY, -1),
    ],
    cases.NO_LENGTH: [cases.AddressCase(([4_096], []), [(0, 16)], [1], 4), cases.BlockCase(([4_096], []), 1)],
    cases.SIZES: [
        cases.GridCase(0, None),
        cases.GridCase(-16, None),
        cases.GridCase(16, -16),
        cases.BlobCase(memoryview, bytes(8), -1, cases.WHOLE_VIEW),
        cases.ChunkViewCase(cases.list_of, 4, 0, 16, cases.WHOLE_VIEW),
        cases.ChunkViewCase(cases.list_of, 4, 16, 0, cases.WHOLE_VIEW),
    ],
    cases.RANK: [
        cases.ChunksCase(16, cases.list_of, 4, 0, {"put_step": 2, "put_step_rank": 2}),
        cases.ChunksCase(16, cases.list_of, 4, 0, {"put_step": 2, "put_step_rank": -1}),
    ],
    cases.OVERFLOW: [
        cases.GridCase(BIG, None),
        cases.BlockCase(MEMORY, 2**62),
        cases.BlockCase(([2**64 - 1], [2]), 0),
        cases.AddressCase(MEMORY, [(0, 16)], [2**62], 4),
        cases.ChunksCase(16, cases.list_of, 4, BIG, {}),
        cases.KeyCase({**FIELDS, "tp_rank": BIG}, {}, "00", b""),
    ],
    cases.UNSIGNED: [
        cases.AddressCase(([BIG], [64]), [(0, 16)], [1], 4),
        cases.AddressCase(([-1], [64]), [(0, 16)], [1], 4),
        cases.AddressCase(([0], [-64]), [(0, 16)], [1], 4),
        cases.BlockCase(([-1], [64]), 1),
    ],
    cases.ORDER: [cases.OrderCase([(FIELDS, "00"), ({**FIELDS, "tp_rank": 1}, "00")])],
    cases.BUFFER: [
        cases.BlobCase(bytes, bytes(64), 32, cases.WHOLE_VIEW),
        cases.BlobCase(lambda data: memoryview(data).cast("Q"), bytes(64), 32, cases.WHOLE_VIEW),
        cases.BlobCase(lambda data: memoryview(data)[::2], bytes(64), 32, cases.WHOLE_VIEW),
        cases.BlobCase(list, bytes(64), 32, cases.WHOLE_VIEW),
    ],
    cases.RAGGED: [cases.ChunkViewCase(cases.list_of, 5, 4, 8, [cases.at(-1)])],
    cases.INDEX: [
        cases.ChunkViewCase(cases.list_of, 4, 4, 8, [cases.at(np.int64(0))]),
        cases.BlobCase(memoryview, bytes(64), 32, [cases.at(99.0)]),
    ],
    cases.TEXT: [
        cases.KeyCase({**FIELDS, "model_name": "\ud800"}, {}, "00", b""),
        cases.KeyCase({**FIELDS, "cache_prefix": "\udfff"}, {}, "00", b""),
        cases.KeyCase(FIELDS, {}, "\udc00", b""),
    ],
    cases.TYPES: [
        cases.KeyCase({**FIELDS, "model_name": 5}, {}, "00", b""),
        cases.KeyCase({**FIELDS, "tp_rank": 1.5}, {}, "00", b""),
        cases.KeyCase({**FIELDS, "tp_rank": True}, {}, "00", b""),
        cases.AddressCase(MEMORY, [(0, 16)], [1.5], 4),
    ],
    cases.RESULTS: [cases.BlockCase(MEMORY, np.int64(1))],
}
"""For each difference, inputs that show it."""


@pytest.mark.parametrize("row", LISTED)
def test_each_listed_difference_is_one(reference: Any, row: str) -> None:  # noqa: ANN401
    for case in LISTED[row]:
        assert case.difference() == row, case
        assert case.run(mooncrate.data) == case.run(twin), case
        assert case.run(mooncrate.data) != case.run(reference), case


def test_no_listed_difference_is_without_an_input() -> None:
    rows = {value for name, value in vars(cases).items() if name.isupper() and isinstance(value, str)}
    assert rows == set(LISTED)


def test_what_was_told_is_a_snapshot_here_alone(reference: Any) -> None:  # noqa: ANN401
    def told_blocks(api: Any) -> object:  # noqa: ANN401 - any module
        tracker = api.RequestTracker("r", 16, ([1],), token_ids=[7])
        told = api.ReqMeta.from_request_tracker(tracker, 16)
        tracker.update([2])
        tracker.token_ids.append(8)
        unfinished = {"r"}
        metadata = api.MooncakeStoreConnectorMetadata(unfinished, set())
        unfinished.clear()
        return told.block_ids, told.token_ids, metadata.unfinished_request_ids

    assert told_blocks(mooncrate.data) == told_blocks(twin) == (([1],), [7], {"r"})
    assert told_blocks(reference) == (([1, 2],), [7, 8], set())


def test_what_a_database_was_given_is_a_snapshot_here_alone(reference: Any) -> None:  # noqa: ANN401
    def row(api: Any) -> object:  # noqa: ANN401 - any module
        database = cases.new_database(api)
        base_addrs, block_len = [4_096], [64]
        database.set_kv_caches_base_addr(base_addrs)
        database.set_block_len(block_len)
        base_addrs[0] = block_len[0] = 0
        return database.prepare_value_for_block(1)

    assert row(mooncrate.data) == row(twin) == ([4_160], [64])
    assert row(reference) == ([0], [0])


def test_views_and_sizes_are_fixed_here_alone(reference: Any) -> None:  # noqa: ANN401
    def changed(api: Any) -> list[object]:  # noqa: ANN401 - any module
        view = api.chunk_hashes_for_block_size([b"0", b"1"], 16, 32)
        database = cases.new_database(api)
        changes: list[Callable[[], object]] = [
            lambda: setattr(view, "scale_factor", 1),
            lambda: setattr(database, "block_size", 32),
            lambda: setattr(database, "hash_block_size", 32),
            lambda: (type("Sub", (api.BlobBlockHashes,), {}), None)[1],
        ]
        return [outcome(change).type_name for change in changes]

    assert changed(mooncrate.data) == ["Raised"] * 4
    assert changed(reference) == ["NoneType"] * 4


# The vectors that both languages share


def test_key_vectors_are_the_texts_of_the_reference(reference: Any) -> None:  # noqa: ANN401
    for vector in vectors("keys.json"):
        fields = {name: vector[name] for name in FIELDS}
        metadata = reference.KeyMetadata(**fields)
        assert reference.PoolKey.build_prefix(metadata) == vector["prefix"]
        assert reference.PoolKey(metadata, vector["chunk_hash"]).to_string() == vector["key"]
        raw = bytes.fromhex(vector["chunk_hash"])
        assert reference.ChunkedTokenDatabase(metadata, 16).key_for(raw) == vector["key"]


def test_chunk_vectors_are_the_chunks_of_the_reference(reference: Any) -> None:  # noqa: ANN401
    for vector in vectors("chunks.json"):
        step, rank = vector["put_step"], vector["put_step_rank"]
        if step > 0 and not 0 <= rank < step:
            continue
        database = cases.new_database(reference, vector["block_size"], vector["hash_block_size"])
        options = {"chunk_mask": vector["chunk_mask"], "put_step": step, "put_step_rank": rank}
        chunks = database.process_tokens(
            vector["token_len"], list(range(vector["num_hashes"])), vector["mask_num"], **options
        )
        if "error" in vector:
            with pytest.raises(AssertionError):
                list(chunks)
        else:
            assert [list(chunk) for chunk in chunks] == vector["chunks"]


def test_address_vectors_are_the_addresses_of_the_reference(reference: Any) -> None:  # noqa: ANN401
    num_compared = 0
    for vector in vectors("addresses.json"):
        case = cases.AddressCase(
            (vector["base_addrs"], vector["block_len"]),
            vector["chunks"],
            vector["block_ids"],
            vector["block_size"] // vector["hash_block_size"],
            vector["hash_block_size"],
        )
        if case.difference() is None:
            num_compared += 1
            assert case.run(reference) == case.run(mooncrate.data)
    assert num_compared > 12


def test_chunk_hash_vectors_are_the_hashes_of_the_reference(reference: Any) -> None:  # noqa: ANN401
    for vector in vectors("chunk_hashes.json"):
        if "error" not in vector:
            hashes = list(range(vector["num_hashes"]))
            sizes = vector["hash_block_size"], vector["target_block_size"]
            assert list(reference.chunk_hashes_for_block_size(hashes, *sizes)) == vector["hash_indexes"]
