"""`LookupPlan` against the coordinator of vLLM 0.32.0's Mooncake connector, on random pools.

Both are told the same presence of chunks under the same namespaces. vLLM asks for everything at once and then searches
the answers; `LookupPlan` asks as it goes. The number of tokens that can be loaded must be the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncrate import LookupPlan
from mooncrate.groups import CacheGroup, GroupKind
from vllm_import import import_vllm

pytestmark = pytest.mark.vllm_version("0.32.0")

NUM_EXAMPLES = max(2_000, settings.default.max_examples if settings.default else 0)
HASH_BLOCK_SIZE = 4
BLOCK_SIZES = (4, 8, 12, 16)
Presence = list[list[list[bool]]]
"""By group, namespace and chunk."""


@dataclass
class Pool:
    """What the pool holds of one prompt."""

    num_tokens: int
    hashes: list[bytes]
    groups: list[CacheGroup]
    presence: Presence


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Prompts of up to 160 tokens, up to three groups of up to three namespaces, with holes here and there."""
    num_tokens = draw(st.integers(1, 160))
    hashes = [index.to_bytes(2, "big") for index in range(num_tokens // HASH_BLOCK_SIZE)]
    block_sizes = st.sampled_from(BLOCK_SIZES)
    group = st.one_of(
        st.builds(CacheGroup.full_attention, block_sizes),
        st.builds(CacheGroup.sliding_window, block_sizes, st.integers(2, 70)),
        st.builds(CacheGroup.recurrent, block_sizes),
    )
    groups = draw(st.lists(group, min_size=1, max_size=3))
    presence: Presence = []
    for one in groups:
        num_chunks = len(hashes) * HASH_BLOCK_SIZE // one.block_size
        holes = st.sets(st.integers(0, max(0, num_chunks - 1)), max_size=3)
        reach = st.integers(0, num_chunks) | st.just(num_chunks)
        namespaces = []
        for _ in range(draw(st.integers(1, 3))):
            gone, end = draw(holes), draw(reach)
            namespaces.append([chunk < end and chunk not in gone for chunk in range(num_chunks)])
        presence.append(namespaces)
    return Pool(num_tokens, hashes, groups, presence)


def chunk_hashes(pool: Pool, group: CacheGroup) -> list[bytes]:
    """The last hash inside each chunk."""
    scale = group.block_size // HASH_BLOCK_SIZE
    return pool.hashes[scale - 1 :: scale]


def our_hit(pool: Pool) -> int:
    """Tokens that `LookupPlan` finds."""
    store: dict[str, bool] = {}
    groups = []
    for group_id, (group, namespaces) in enumerate(zip(pool.groups, pool.presence, strict=True)):
        prefixes = [f"m@rank{rank}@group{group_id}" for rank in range(len(namespaces))]
        groups.append((prefixes, group))
        for prefix, present in zip(prefixes, namespaces, strict=True):
            hashes = chunk_hashes(pool, group)[: len(present)]
            store |= {f"{prefix}@{h.hex()}": there for h, there in zip(hashes, present, strict=True)}
    lookup = LookupPlan(pool.num_tokens, pool.hashes, groups, HASH_BLOCK_SIZE)
    while keys := lookup.next_keys():
        lookup.feed([int(store[key]) for key in keys])
    return lookup.num_hit_tokens


def vllm_spec(group: CacheGroup) -> Any:  # noqa: ANN401 - vLLM is not typed here
    """The group as vLLM describes it."""
    interface = import_vllm("v1.kv_cache_interface")
    attention = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if group.kind is GroupKind.FULL_ATTENTION:
        return interface.FullAttentionSpec(group.block_size, **attention)
    if group.kind is GroupKind.SLIDING_WINDOW:
        return interface.SlidingWindowSpec(group.block_size, sliding_window=group.window, **attention)
    return interface.MambaSpec(group.block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def vllm_hit(pool: Pool) -> int:
    """Tokens that vLLM's coordinator finds, derived again below the last token as its worker does."""
    store = import_vllm("distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator")
    interface = import_vllm("v1.kv_cache_interface")
    specs = [
        interface.KVCacheGroupSpec([f"layer{group_id}"], vllm_spec(group)) for group_id, group in enumerate(pool.groups)
    ]
    unit = math.lcm(*(group.block_size for group in pool.groups))
    coordinator = store.MooncakeStoreCoordinator(specs, unit, HASH_BLOCK_SIZE)
    exists = {
        (group_id, chunk_hash)
        for group_id, (group, namespaces) in enumerate(zip(pool.groups, pool.presence, strict=True))
        for chunk_hash, there in zip(chunk_hashes(pool, group), zip(*namespaces, strict=True), strict=False)
        if all(there)
    }
    cached = store.ExternalCachedBlockPool(HASH_BLOCK_SIZE, exists)
    hit = 0
    length = coordinator.align_lookup_length(pool.num_tokens)
    if length > 0:
        _, hit = coordinator.find_longest_cache_hit(pool.hashes, length, cached)
    if hit >= pool.num_tokens:
        length = coordinator.align_lookup_length(pool.num_tokens - 1)
        hit = coordinator.find_longest_cache_hit(pool.hashes, length, cached)[1] if length > 0 else 0
    return hit


@settings(max_examples=NUM_EXAMPLES)
@given(pools())
def test_the_hit_is_that_of_vllms_coordinator(pool: Pool) -> None:
    assert our_hit(pool) == vllm_hit(pool)


@pytest.mark.parametrize(("num_tokens", "hit"), [(64, 48), (65, 64), (16, 0), (1, 0)])
def test_a_full_prompt_hit_is_derived_again_below_the_last_token(num_tokens: int, hit: int) -> None:
    hashes = [index.to_bytes(2, "big") for index in range(num_tokens // HASH_BLOCK_SIZE)]
    group = CacheGroup.full_attention(16)
    pool = Pool(num_tokens, hashes, [group], [[[True] * (num_tokens // 16)]])
    assert (our_hit(pool), vllm_hit(pool)) == (hit, hit)
