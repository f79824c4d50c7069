"""Groups, ranks, keys and memory against vLLM's own: its specs, and the data module of its Mooncake connector."""

import math
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from connector_parts import (
    cache_config,
    connector_module,
    full_spec,
    make_layout,
    mamba_spec,
    mla_spec,
    open_pool,
    sliding_spec,
    vllm_config,
)
from mooncrate.errors import LayoutError
from mooncrate.groups import CacheGroup
from mooncrate.kv_caches import describe_kv_caches
from mooncrate.memory_store import MemoryStore
from vllm_import import import_vllm

pytestmark = pytest.mark.vllm_version("0.32.0")

STORE: Final = "distributed.kv_transfer.kv_connector.v1.mooncake.store"
TOPOLOGIES: Final[list[dict[str, Any]]] = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "num_kv_heads": 2},
    {"tp": 8, "num_kv_heads": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 4, "pp": 2, "num_kv_heads": 1},
    {"pcp": 2},
    {"tp": 4, "dcp": 2},
    {"tp": 4, "dcp": 4, "num_kv_heads": 1},
]


def reference_worker(specs: list[Any], config: dict[str, Any]) -> Any:  # noqa: ANN401
    """VLLM's worker as far as it makes keys, at the first rank."""
    worker: Any = import_vllm(f"{STORE}.worker")
    utils, interface = import_vllm("v1.core.kv_cache_utils"), import_vllm("v1.kv_cache_interface")
    it = worker.MooncakeStoreWorker.__new__(worker.MooncakeStoreWorker)
    it.tp_size, it.pp_size = config.get("tp", 1), config.get("pp", 1)
    it.pcp_size, it.dcp_size = config.get("pcp", 1), config.get("dcp", 1)
    it.num_kv_head = config.get("num_kv_heads", 8)
    it.tp_rank = 0
    resolved = [utils.resolve_dcp_kv_cache_spec(spec, it.dcp_size) for spec in specs]
    it._kv_cache_groups = [interface.KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(resolved)]
    it.hash_block_size = math.gcd(*(spec.block_size for spec in resolved))
    it._group_tp_replication_factors = it._compute_group_tp_replication_factors()
    return it


@pytest.mark.parametrize("config", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("kinds", ["full", "mla", "full+sliding", "mla+full"])
def test_the_keys_of_every_rank_are_those_of_vllms_connector(config: dict[str, Any], kinds: str) -> None:
    make = {
        "full": full_spec,
        "mla": mla_spec,
        "sliding": lambda: sliding_spec(33, 8),
    }
    specs = [make[kind]() for kind in kinds.split("+")]
    if config.get("pcp", 1) > 1 and len(specs) > 1:
        with pytest.raises(LayoutError, match="prefill context parallelism with several KV cache groups"):
            make_layout(*specs, **config)
        return
    data: Any = import_vllm(f"{STORE}.data")
    reference = reference_worker(specs, config)
    layout = make_layout(*specs, **config)
    topology_of = connector_module("layout").topology_of
    tp, pp, pcp, dcp = (config.get(name, 1) for name in ("tp", "pp", "pcp", "dcp"))
    prefixes = set()
    for rank in range(tp * pp):
        for pcp_rank in range(pcp):
            tp_rank, pp_rank = rank % tp, rank // tp % pp
            topology = topology_of(vllm_config(**config), tp_rank=tp_rank, pcp_rank=pcp_rank, rank=rank)
            reference.tp_rank = tp_rank
            metadata = data.KeyMetadata("tiny-model", tp_rank, pcp_rank, tp_rank % dcp if dcp > 1 else 0, pp_rank)
            theirs = [database.key_for(b"\x01\xab") for database in reference._build_token_databases(metadata, None)]
            with open_pool(layout, MemoryStore(), topology) as pool:
                ours = [database.key_for(b"\x01\xab") for database in pool._keys.databases()]
            assert ours == theirs
            prefixes |= set(theirs)
    reference.token_dbs = reference._build_token_databases(data.KeyMetadata("tiny-model", 0, 0, 0, 0), None)
    reference._init_lookup_key_prefixes()
    with open_pool(layout, MemoryStore(), topology_of(vllm_config(**config))) as pool:
        asked = [tuple(group_prefixes) for group_prefixes, _ in pool._keys.lookup_groups()]
    assert asked == list(reference._lookup_key_prefixes)
    assert {f"{prefix}@01ab" for group_prefixes in asked for prefix in group_prefixes} == prefixes


def test_groups_are_read_from_specs() -> None:
    layout = make_layout(full_spec(32), sliding_spec(100, 16), mla_spec(16), tp=4, num_kv_heads=2)
    assert layout.groups == (
        CacheGroup.full_attention(32, tp_replicas=2),
        CacheGroup.sliding_window(16, 100, tp_replicas=2),
        CacheGroup.full_attention(16, tp_replicas=4),
    )
    assert (layout.hash_block_size, layout.block_size, layout.group_ids) == (16, 32, (0, 1, 2))
    assert (layout.model_name, layout.num_ranks, len(layout.layer_names)) == ("tiny-model", 4, 6)


def test_layers_of_one_type_but_several_sizes_are_one_group() -> None:
    interface: Any = import_vllm("v1.kv_cache_interface")
    specs = {"group 0 layer 0": full_spec(), "group 0 layer 1": full_spec(num_heads=4)}
    spec = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    assert make_layout(spec).groups == (CacheGroup.full_attention(16),)


def test_groups_that_are_not_prefix_cacheable_are_left_out() -> None:
    interface: Any = import_vllm("v1.kv_cache_interface")
    config = cache_config(full_spec(), full_spec())
    config.kv_cache_groups[0].enable_kv_transfer = False
    layout = connector_module("layout").EngineLayout.of(vllm_config(), config)
    assert isinstance(config.kv_cache_groups[0], interface.KVCacheGroupSpec)
    assert (layout.group_ids, layout.layer_names) == ((1,), {"group 1 layer 0", "group 1 layer 1"})


def _chunked(_: object) -> Any:  # noqa: ANN401
    interface: Any = import_vllm("v1.kv_cache_interface")
    return interface.ChunkedLocalAttentionSpec(
        16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_layout(mamba_spec()), r"group 0: MambaSpec \(recurrent layers are not supported yet\)"),
        (lambda: make_layout(full_spec(), mamba_spec()), "group 1: MambaSpec"),
        (lambda: make_layout(_chunked(None)), "group 0: ChunkedLocalAttentionSpec"),
        (lambda: make_layout(full_spec(), sleep_mode=True), "sleep mode"),
        (
            lambda: make_layout(full_spec(), speculative=SimpleNamespace(use_eagle_block_drop=lambda: True)),
            "speculative decoding that drops the last block",
        ),
        (lambda: make_layout(full_spec(), tp=2, pcp=2, dcp=2), "prefill and decode context parallelism together"),
        (make_layout, "without prefix-cacheable KV cache groups"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name(make: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(LayoutError, match=f"MooncrateConnector does not support .*{message}"):
        make()


def test_hisparse_is_refused() -> None:
    config = cache_config(full_spec(), hisparse_host_num_blocks=4)
    with pytest.raises(LayoutError, match="HiSparse"):
        connector_module("layout").EngineLayout.of(vllm_config(), config)


def regions_of(caches: dict[str, torch.Tensor], num_blocks: int) -> list[tuple[int, int]]:
    """Addresses and lengths of a block as the connector registers them."""
    layout = SimpleNamespace(layer_names=set(caches), num_blocks=num_blocks, groups=[None])
    (views,) = connector_module("layout").block_views(caches, layout)
    regions = describe_kv_caches(views, num_blocks, block_dim=0).regions
    assert all(region.block_stride == region.block_bytes for region in regions)
    return [(region.base_addr, region.block_bytes) for region in regions]


def reference_regions(caches: dict[str, torch.Tensor], num_blocks: int) -> list[tuple[int, int]]:
    """The same as vLLM derives them."""
    data, interface = import_vllm(f"{STORE}.data"), import_vllm("v1.kv_cache_interface")
    layout = data.RankLocalStoreLayout(data.KeyMetadata("m", 0, 0, 0, 0), 16, 16)
    tensors = [interface.group_kernel_blocks(cache, num_blocks) for cache in caches.values()]
    layout.register_kv_caches(tensors, num_blocks)
    return list(zip(layout.kv_caches_base_addr, layout.block_len, strict=True))


LAYOUTS: Final = [("LBHNC", 0), ("LBNHC", 0), ("LHBNC", 0), ("BLHNC", 0), ("BLNHC", 0)]
PADDED: Final = [("LBHNC", 64), ("LBNHC", 64), ("BLHNC", 64), ("BLNHC", 64)]  # in LHBNC no block is whole


@pytest.mark.parametrize(("name", "padding"), LAYOUTS + PADDED)
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (1, 3), (2, 1), (4, 3)])
def test_objects_hold_what_vllms_hold_in_every_layout(name: str, padding: int, num_heads: int, num_layers: int) -> None:
    """With padding behind each block too, which vLLM stores as well."""
    num_blocks, num_tokens, content = 5, 16, 8
    order = import_vllm("v1.kv_cache_layout").KVCacheLayout[name].stride_order
    sizes = (num_layers, num_blocks, num_heads, num_tokens, content)
    strides, step = [0] * 5, 1
    for place in range(4, -1, -1):
        if place == 1 and padding:  # behind what a layer's block, or a block's layer, holds
            step += padding
        strides[order[place]] = step
        step *= sizes[order[place]]
    storage = torch.zeros(step)
    logical = storage.as_strided(sizes, strides)
    caches = {f"layer {index}": logical[index] for index in range(num_layers)}
    assert regions_of(caches, num_blocks) == reference_regions(caches, num_blocks)


def test_kernel_blocks_are_joined_to_the_blocks_of_the_manager() -> None:
    caches = {"layer": torch.zeros(5 * 4, 2, 4, 8)}
    assert regions_of(caches, 5) == reference_regions(caches, 5)
    assert len(regions_of(caches, 5)) == 1


def test_groups_that_share_tensors_have_the_bytes_of_all_of_them() -> None:
    """As in vLLM: a group with fewer layers than another still moves every tensor."""
    first, second = torch.zeros(5, 1, 16, 8), torch.zeros(5, 1, 16, 8)
    caches = {"a": first, "b": second, "c": first.view(5, 1, 8, 16)}
    assert regions_of(caches, 5) == reference_regions(caches, 5)
    assert len(regions_of(caches, 5)) == 2


def test_foreign_data_inside_a_block_is_refused() -> None:
    caches = {"layer": torch.zeros(5, 2, 3, 16, 8)[:, :, 1]}  # heads outside the layers of a block
    with pytest.raises(LayoutError, match="blocks in several runs"):
        regions_of(caches, 5)


def test_a_layer_without_a_tensor_is_refused() -> None:
    layout = SimpleNamespace(layer_names={"a", "b"}, num_blocks=5, groups=[None])
    with pytest.raises(LayoutError, match=r"no KV cache was registered for layers \['b'\]"):
        connector_module("layout").block_views({"a": torch.zeros(5, 8)}, layout)


@pytest.mark.parametrize("retention_interval", [None, 0, 128])
def test_the_mask_of_a_save_is_that_of_vllms_connector(retention_interval: int | None) -> None:
    coordinator: Any = import_vllm(f"{STORE}.coordinator")
    config = cache_config(full_spec(32), sliding_spec(33, 16), prefix_cache_retention_interval=retention_interval)
    layout = connector_module("layout").EngineLayout.of(vllm_config(), config)
    reference = coordinator.MooncakeStoreCoordinator(
        config.kv_cache_groups, 32, 16, retention_interval=retention_interval
    )
    for num_tokens, start, num_prefill in [(320, 0, 321), (320, 64, 320), (96, 0, 1000), (0, 0, 10), (640, 320, 700)]:
        theirs = reference.store_mask(num_tokens, start, num_prompt_tokens=num_prefill)
        ours = tuple(
            layout.chunk_mask(num_prefill, group_id, start // group.block_size, num_tokens // group.block_size)
            for group_id, group in enumerate(layout.groups)
        )
        assert ours == theirs
