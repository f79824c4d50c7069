"""The vectors that Rust and Python share, `tests/vectors/*.json`, on the package and on its naive twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mooncrate.data
import reference
from cases import RANKS, new_database

VECTORS = Path(__file__).parent / "vectors"
both = pytest.mark.parametrize("api", [mooncrate.data, reference], ids=["mooncrate", "twin"])


def vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / name).read_text())["vectors"]
    assert len(found) > 20, f"{name} lost its vectors"
    return found


def check(api: Any, vector: dict[str, Any], call: Callable[[], object], expected: Callable[[], object]) -> None:  # noqa: ANN401
    """Compare a call with what the vector says; the text of an error is the package's alone."""
    if "error" not in vector:
        assert call() == expected(), vector
        return
    with pytest.raises((AssertionError, ValueError, OverflowError)) as caught:
        call()
    assert api is reference or str(caught.value) == vector["error"]


@both
def test_keys(api: Any) -> None:  # noqa: ANN401
    for vector in vectors("keys.json"):
        fields = {name: vector[name] for name in ("model_name", *RANKS, "group_id", "cache_prefix")}
        metadata = api.KeyMetadata(**fields)
        assert api.PoolKey.build_prefix(metadata) == vector["prefix"]
        assert api.PoolKey(metadata, vector["chunk_hash"]).to_string() == vector["key"]
        raw = bytes.fromhex(vector["chunk_hash"])
        database = api.ChunkedTokenDatabase(metadata, 16)
        assert database.key_for(raw) == database.key_for(memoryview(raw)) == vector["key"]


@both
def test_key_texts_are_as_many_as_field_tuples_except_where_names_hold_the_separator(api: Any) -> None:  # noqa: ANN401
    """The frozen text has one known weakness, which vectors hold on purpose: `x` + `y@z` reads like `x@y` + `z`."""
    prefix = api.PoolKey.build_prefix
    assert prefix(api.KeyMetadata("y@z", 0, 0, 0, 0, cache_prefix="x")) == prefix(
        api.KeyMetadata("z", 0, 0, 0, 0, cache_prefix="x@y")
    )


@both
def test_chunks(api: Any) -> None:  # noqa: ANN401
    for vector in vectors("chunks.json"):
        database = new_database(api, vector["block_size"], vector["hash_block_size"])
        options = {name: vector[name] for name in ("chunk_mask", "put_step", "put_step_rank")}
        chunks = database.process_tokens(
            vector["token_len"], range(vector["num_hashes"]), vector["mask_num"], **options
        )
        check(api, vector, lambda chunks=chunks: [list(chunk) for chunk in chunks], lambda v=vector: v["chunks"])  # type: ignore[misc]


@both
def test_addresses(api: Any) -> None:  # noqa: ANN401
    for vector in vectors("addresses.json"):
        database = new_database(api, vector["block_size"], vector["hash_block_size"])
        database.set_kv_caches_base_addr(vector["base_addrs"])
        database.set_block_len(vector["block_len"])
        check(
            api,
            vector,
            lambda database=database, v=vector: database.prepare_values(v["chunks"], v["block_ids"]),  # type: ignore[misc]
            lambda v=vector: (v["addrs"], v["sizes"], v["chunk_block_ids"]),  # type: ignore[misc]
        )


@both
def test_hash_spans(api: Any) -> None:  # noqa: ANN401
    for vector in vectors("hash_spans.json"):
        blob = bytes(place % 251 for place in range(vector["num_bytes"]))
        check(
            api,
            vector,
            lambda blob=blob, v=vector: list(api.BlobBlockHashes(blob, v["hash_len"])),  # type: ignore[misc]
            lambda blob=blob, v=vector: [blob[start:end] for start, end in v["spans"]],  # type: ignore[misc]
        )


@both
def test_chunk_hashes(api: Any) -> None:  # noqa: ANN401
    for vector in vectors("chunk_hashes.json"):
        sizes = vector["hash_block_size"], vector["target_block_size"]
        check(
            api,
            vector,
            lambda v=vector, sizes=sizes: list(api._CompactChunkHashList(range(v["num_hashes"]), *sizes)),  # type: ignore[misc]
            lambda v=vector: v["hash_indexes"],  # type: ignore[misc]
        )
