"""Real objects of vLLM for tests of the connector without an engine: configurations, requests, blocks and steps.

vLLM is imported when a function is called, so that these modules can be collected under any version of it.
"""

import functools
import hashlib
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

from mooncrate import KVPool
from mooncrate.memory_store import MemoryStore
from vllm_import import import_vllm

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 64
LAYERS_PER_GROUP: Final = 2


def connector_module(name: str) -> Any:  # noqa: ANN401 - a module
    """Import ``mooncrate.vllm.<name>``."""
    import_vllm("v1.kv_cache_interface")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"mooncrate.vllm.{name}")


def full_spec(block_size: int = BLOCK_SIZE, num_heads: int = 1) -> Any:  # noqa: ANN401
    """A full-attention layer."""
    return _attention("FullAttentionSpec", block_size, num_heads)


def sliding_spec(window: int, block_size: int = BLOCK_SIZE) -> Any:  # noqa: ANN401
    """A sliding-window layer."""
    return _attention("SlidingWindowSpec", block_size, 1, sliding_window=window)


def mla_spec(block_size: int = BLOCK_SIZE) -> Any:  # noqa: ANN401
    """A layer that keeps one latent vector per token."""
    return _attention("MLAAttentionSpec", block_size, 1)


def mamba_spec(block_size: int = BLOCK_SIZE) -> Any:  # noqa: ANN401
    """A recurrent layer."""
    interface, torch = import_vllm("v1.kv_cache_interface"), import_module("torch")
    return interface.MambaSpec(block_size, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def _attention(name: str, block_size: int, num_heads: int, **more: object) -> Any:  # noqa: ANN401
    interface, torch = import_vllm("v1.kv_cache_interface"), import_module("torch")
    return getattr(interface, name)(block_size, num_kv_heads=num_heads, head_size=8, dtype=torch.float32, **more)


def cache_config(*specs: Any, num_blocks: int = NUM_BLOCKS, **more: object) -> Any:  # noqa: ANN401
    """A ``KVCacheConfig`` with one group of two layers for each spec."""
    interface = import_vllm("v1.kv_cache_interface")
    groups = [
        interface.KVCacheGroupSpec([f"group {index} layer {layer}" for layer in range(LAYERS_PER_GROUP)], spec)
        for index, spec in enumerate(specs)
    ]
    return interface.KVCacheConfig(num_blocks, [], groups, **more)


def vllm_config(
    *,
    role: str = "kv_both",
    extra: dict[str, Any] | None = None,
    num_kv_heads: int = 8,
    tp: int = 1,
    pp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    rank: int = 0,
    block_size: int = BLOCK_SIZE,
    **more: object,
) -> Any:  # noqa: ANN401
    """What the connector reads of a ``VllmConfig``, whose constructor wants a model and devices."""
    transfer_config = import_vllm("config").KVTransferConfig(
        kv_connector="MooncrateConnector",
        kv_connector_module_path="mooncrate.vllm",
        kv_role=role,
        kv_connector_extra_config=extra or {},
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        world_size=tp * pp * pcp,
        rank=rank,
    )
    model = SimpleNamespace(
        model="somewhere/tiny-model/",
        get_total_num_kv_heads=lambda: num_kv_heads,
        enable_sleep_mode=bool(more.get("sleep_mode")),
    )
    return SimpleNamespace(
        kv_transfer_config=transfer_config,
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(block_size=block_size, prefix_match_unit=None, enable_prefix_caching=True),
        speculative_config=more.get("speculative"),
        kv_events_config=None,
    )


def make_layout(*specs: Any, **config: Any) -> Any:  # noqa: ANN401
    """The `EngineLayout` of an engine with these groups."""
    return connector_module("layout").EngineLayout.of(vllm_config(**config), cache_config(*specs))


def open_pool(layout: Any, store: MemoryStore, topology: Any) -> KVPool:  # noqa: ANN401
    """A pool of one rank, or of the scheduler."""
    return KVPool.open(
        store=store,
        model_name=layout.model_name,
        groups=layout.groups,
        hash_block_size=layout.hash_block_size,
        topology=topology,
    )


def make_request(name: str, num_tokens: int, *, seed: int = 0, hash_block_size: int = BLOCK_SIZE) -> Any:  # noqa: ANN401
    """A ``Request`` with vLLM's own block hashes; equal seeds share their prefixes."""
    kv_cache_utils = import_vllm("v1.core.kv_cache_utils")
    _init_hashes()
    hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, sha256)
    return import_vllm("v1.request").Request(
        name,
        [(index * index + seed) % 1000 for index in range(num_tokens)],
        import_vllm("sampling_params").SamplingParams(max_tokens=64),
        None,
        block_hasher=hasher,
    )


def sha256(value: object) -> bytes:
    """A hash of anything that can be written down."""
    return hashlib.sha256(repr(value).encode()).digest()


@functools.cache
def _init_hashes() -> None:
    import_vllm("v1.core.kv_cache_utils").init_none_hash(sha256)


class Blocks:
    """vLLM's block pool, and the tables of requests in it."""

    def __init__(self, num_groups: int = 1, num_blocks: int = NUM_BLOCKS) -> None:
        """Make a pool in which everything but the null block is free."""
        block_pool = import_vllm("v1.core.block_pool")
        self.pool = block_pool.BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)
        self.num_groups = num_groups
        self.tables: dict[str, tuple[list[Any], ...]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
        return int(self.pool.get_num_free_blocks())

    def allocate(self, name: str, num_tokens: int) -> Any:  # noqa: ANN401
        """Give a request blocks for so many tokens in all, in each group; return its ``KVCacheBlocks``."""
        tables = self.tables.setdefault(name, tuple([] for _ in range(self.num_groups)))
        for table in tables:
            table.extend(self.pool.get_new_blocks(-(-num_tokens // BLOCK_SIZE) - len(table)))
        return import_vllm("v1.core.kv_cache_manager").KVCacheBlocks(tables)

    def ids(self, name: str) -> tuple[list[int], ...]:
        """Return the block tables of a request."""
        return tuple([block.block_id for block in table] for table in self.tables[name])

    def free(self, name: str) -> None:
        """Take back a request's own references."""
        for table in self.tables.pop(name):
            self.pool.free_blocks(reversed(table))


def make_step(
    blocks: Blocks,
    *,
    new: dict[str, tuple[int, int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    resumed: set[str] | None = None,
    preempted: set[str] | None = None,
    finished: set[str] | None = None,
) -> Any:  # noqa: ANN401
    """A ``SchedulerOutput``.

    Args:
        blocks: Where the requests' blocks lie.
        new: Per request its prompt tokens, those computed before, and those of this step.
        cached: Per request the tokens computed before, and those of this step.
        resumed: Which of those were preempted before.
        preempted: Requests that lost their blocks.
        finished: Requests that ended.
    """
    output = import_vllm("v1.core.sched.output")
    new, cached = new or {}, cached or {}
    num_scheduled = {name: tokens[-1] for name, tokens in (new | cached).items()}
    step = output.SchedulerOutput.make_empty()
    step.num_scheduled_tokens = num_scheduled
    step.total_num_scheduled_tokens = sum(num_scheduled.values())
    step.finished_req_ids = finished or set()
    step.preempted_req_ids = preempted or set()
    step.scheduled_new_reqs = [
        output.NewRequestData(name, [0] * num_prompt, [], None, None, blocks.ids(name), num_computed, None)
        for name, (num_prompt, num_computed, _) in new.items()
    ]
    step.scheduled_cached_reqs = output.CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=resumed or set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(cached),
        num_computed_tokens=[tokens[0] for tokens in cached.values()],
        num_output_tokens=[0] * len(cached),
    )
    step.kv_connector_block_state = output.KVConnectorBlockState(set(num_scheduled), blocks.ids, {})
    return step
