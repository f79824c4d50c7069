"""Regions and ranks against vLLM 0.32.0's own: where its objects hold no padding, ours are the same byte for byte."""

import math
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncrate.groups import CacheGroup, RankTopology
from mooncrate.kv_caches import describe_kv_caches
from vllm_import import import_vllm

pytestmark = pytest.mark.vllm_version("0.32.0")

STORE: Final = "distributed.kv_transfer.kv_connector.v1.mooncake.store"
LAYOUTS: Final = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC"]  # not BHLNC: vLLM reads past the heads there


@pytest.fixture(scope="module", autouse=True)
def reference() -> None:
    """Imports vLLM before anything is timed."""
    for module in (f"{STORE}.data", f"{STORE}.worker"):
        import_vllm(module)


def reference_regions(caches: dict[str, torch.Tensor], num_blocks: int) -> list[tuple[int, int]]:
    """Returns addresses and lengths as vLLM derives them."""
    data: Any = import_vllm(f"{STORE}.data")
    interface: Any = import_vllm("v1.kv_cache_interface")
    layout = data.RankLocalStoreLayout(data.KeyMetadata("m", 0, 0, 0, 0), 16, 16)
    layout.register_kv_caches(
        [interface.group_kernel_blocks(cache, num_blocks) for cache in caches.values()], num_blocks
    )
    return list(zip(layout.kv_caches_base_addr, layout.block_len, strict=True))


def our_regions(caches: dict[str, torch.Tensor], num_blocks: int) -> list[tuple[int, int]]:
    """Returns the same as `describe_kv_caches` has it, and checks that nothing is padded."""
    regions = describe_kv_caches(caches, num_blocks, block_dim=0).regions
    assert all(region.block_stride == region.block_bytes for region in regions)
    return [(region.base_addr, region.block_bytes) for region in regions]


@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None)  # vLLM logs and imports as it likes
@given(st.data())
def test_layers_in_one_allocation(name: str, data: st.DataObject) -> None:
    layouts: Any = import_vllm("v1.kv_cache_layout")
    order = layouts.KVCacheLayout[name].stride_order
    num_layers, num_heads, num_tokens, content = (data.draw(st.integers(1, 4)) for _ in range(4))
    num_blocks = data.draw(st.integers(2, 7))
    num_parts = 1 if name == "LHBNC" or (name[0] == "B" and num_layers > 1) else data.draw(st.integers(1, 3))
    shape = (num_layers, num_blocks * num_parts, num_heads, num_tokens, content)
    physical = torch.zeros(math.prod(shape), dtype=torch.bfloat16).view([shape[axis] for axis in order])
    logical = physical.permute([order.index(axis) for axis in range(5)])
    assert logical.shape == shape
    layers = data.draw(st.permutations(range(num_layers)))
    caches = {f"layer {index}": logical[index] for index in layers}
    assert our_regions(caches, num_blocks) == reference_regions(caches, num_blocks)


@settings(deadline=None)  # vLLM logs and imports as it likes
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(2, 7), st.integers(1, 4))
def test_layers_in_allocations_of_their_own(inner: list[int], num_blocks: int, num_layers: int) -> None:
    caches = {str(index): torch.zeros(num_blocks, *inner, dtype=torch.float16) for index in range(num_layers)}
    caches["shared"] = caches["0"]
    assert our_regions(caches, num_blocks) == reference_regions(caches, num_blocks)


@settings(deadline=None)  # vLLM logs and imports as it likes
@given(st.data())
def test_namespaces_of_a_lookup(data: st.DataObject) -> None:
    worker: Any = import_vllm(f"{STORE}.worker")
    tp_size, pcp_size, pp_size = (data.draw(st.integers(1, most)) for most in (16, 3, 3))
    dcp_size = (
        data.draw(st.sampled_from([n for n in range(1, tp_size + 1) if tp_size % n == 0])) if pcp_size == 1 else 1
    )
    divisors = [n for n in range(1, tp_size + 1) if tp_size % n == 0] if dcp_size == 1 else [1]
    replicas = data.draw(st.sampled_from(divisors))
    asked: list[Any] = []

    class Database:
        """Stands where a token database would, and keeps what it is asked for."""

        @property
        def store_layout(self) -> "Database":
            return self

        def lookup_key_prefixes(self, namespaces: Any) -> tuple[str, ...]:  # noqa: ANN401
            asked.extend(namespaces)
            return ()

    it = worker.MooncakeStoreWorker.__new__(worker.MooncakeStoreWorker)
    it.tp_size, it.pcp_size, it.pp_size, it.dcp_size = tp_size, pcp_size, pp_size, dcp_size
    it.token_dbs, it._group_tp_replication_factors = [Database()], (replicas,)
    it._init_lookup_key_prefixes()
    group = CacheGroup.full_attention(16, tp_replicas=replicas)
    topology = RankTopology(tp_size=tp_size, pcp_size=pcp_size, pp_size=pp_size, dcp_size=dcp_size)
    assert list(topology.lookup_ranks(group)) == asked
