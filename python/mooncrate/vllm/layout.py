"""vLLM's KV cache as `KVPool` sees it: groups, ranks, the name in the keys, and the memory of each block.

Keys and objects are those of vLLM's own Mooncake store connector, byte for byte, so that both can share a pool. Of what
is said here only that decides: whatever would make other keys or other bytes is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm.v1.core.kv_cache_coordinator import replay_boundaries
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from mooncrate.errors import LayoutError
from mooncrate.groups import CacheGroup, GroupKind, RankTopology

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FULL = (FullAttentionSpec, MLAAttentionSpec)
SLIDING = (SlidingWindowSpec, SlidingWindowMLASpec)
MLA = (MLAAttentionSpec, SlidingWindowMLASpec)

# By name: not every version of vLLM has all of them.
REASONS = {
    "MambaSpec": "recurrent layers are not supported yet",
    "CrossAttentionSpec": "what an encoder saw is not part of the block hashes",
    "ChunkedLocalAttentionSpec": "chunked local attention is not supported yet",
}


@dataclass(frozen=True)
class EngineLayout:
    """What all ranks of an engine and its scheduler agree on.

    Attributes:
        model_name: As it stands in keys.
        groups: The KV cache groups that are saved, in the order of their number in keys.
        group_ids: The number that each of them has in vLLM.
        layer_names: All layers of these groups.
        hash_block_size: Tokens per block hash.
        block_size: Tokens that every hit is a multiple of.
        num_blocks: Blocks in every tensor.
        num_ranks: Workers that report to the scheduler.
        specs: What vLLM says of each group's layers.
        retention_interval: Tokens between the ends of sliding windows that vLLM keeps; None for every hit length, 0 for
            the end of a prompt alone.
    """

    model_name: str
    groups: tuple[CacheGroup, ...]
    group_ids: tuple[int, ...]
    layer_names: frozenset[str]
    hash_block_size: int
    block_size: int
    num_blocks: int
    num_ranks: int
    specs: tuple[KVCacheSpec, ...]
    retention_interval: int | None

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Self:
        """Reads it.

        Raises:
            LayoutError: Something that is not supported; all of it is named.
        """
        parallel = vllm_config.parallel_config
        refused = list(_refusals(vllm_config, kv_cache_config))
        if refused:
            raise LayoutError(f"MooncrateConnector does not support {'; '.join(refused)}")
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        dcp_size = parallel.decode_context_parallel_size
        num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        specs = [
            resolve_dcp_kv_cache_spec(group.kv_cache_spec, dcp_size)
            for group in kv_cache_config.prefix_cacheable_groups
        ]
        groups = tuple(
            _group_of(spec, _tp_replicas(spec, parallel.tensor_parallel_size, dcp_size, num_kv_heads)) for spec in specs
        )
        return cls(
            model_name=vllm_config.model_config.model.rstrip("/").split("/")[-1],
            groups=groups,
            group_ids=tuple(kv_cache_config.prefix_cacheable_group_ids),
            layer_names=frozenset(
                name for group in kv_cache_config.prefix_cacheable_groups for name in group.layer_names
            ),
            hash_block_size=hash_block_size,
            block_size=block_size,
            num_blocks=kv_cache_config.num_blocks,
            num_ranks=parallel.world_size,
            specs=tuple(_layer_specs(spec)[0] for spec in specs),
            retention_interval=kv_cache_config.prefix_cache_retention_interval,
        )

    @property
    def is_full_attention_alone(self) -> bool:
        """Whether a prefix stays good when it is cut short anywhere: there is one group, and it needs every block."""
        return [group.kind for group in self.groups] == [GroupKind.FULL_ATTENTION]

    def chunk_mask(
        self, num_prefill_tokens: int, group_id: int, start_chunk: int, end_chunk: int
    ) -> Sequence[bool] | None:
        """Returns which chunks vLLM would keep for a hit, and so which are worth saving; None for all.

        Args:
            num_prefill_tokens: Length of the prompt, at whose end a hit is likely.
            group_id: Number of the group in keys.
            start_chunk: The first.
            end_chunk: After the last.
        """
        spec = self.specs[group_id]
        mask: list[bool] | None = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask(
            start_block=start_chunk,
            end_block=end_chunk,
            alignment_tokens=self.block_size,
            kv_cache_spec=spec,
            use_eagle=False,
            retention_interval=self.retention_interval,
            reachable_boundaries=replay_boundaries(num_prefill_tokens, self.block_size, use_eagle=False),
        )
        return mask


def topology_of(vllm_config: VllmConfig, *, tp_rank: int = 0, pcp_rank: int = 0, rank: int = 0) -> RankTopology:
    """Returns where a rank stands. A scheduler is none, and looks up for all of them.

    Args:
        vllm_config: The sizes.
        tp_rank: Tensor-parallel rank.
        pcp_rank: Prefill-context-parallel rank.
        rank: Rank among all of the engine.
    """
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp_size, dcp_size = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    return RankTopology(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=rank // tp_size % pp_size,
        pp_size=pp_size,
        pcp_rank=pcp_rank,
        pcp_size=pcp_size,
        dcp_rank=(tp_rank * pcp_size + pcp_rank) % dcp_size,
        dcp_size=dcp_size,
    )


def block_views(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], layout: EngineLayout
) -> list[Mapping[str, torch.Tensor | Sequence[torch.Tensor]]]:
    """Returns, for each group, the memory that its objects are made of; dimension 0 counts blocks.

    Groups share tensors, so an object holds a block's bytes in all tensors that any group uses, once each. Where blocks
    lie in slots that are longer than their data the whole slot counts, as for vLLM.

    Raises:
        LayoutError: Layers without a tensor, or a slot that reaches past its storage.
    """
    if missing := layout.layer_names.difference(kv_caches):
        raise LayoutError(f"no KV cache was registered for layers {sorted(missing)}")
    views: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
    for name, value in kv_caches.items():
        if name not in layout.layer_names:
            continue
        if isinstance(value, torch.Tensor):
            views[name] = _whole_blocks(name, value, layout.num_blocks)
        else:
            views[name] = [_whole_blocks(name, tensor, layout.num_blocks) for tensor in value]
    return [views] * len(layout.groups)


def _whole_blocks(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns a tensor whose dimension 0 has one whole slot per block, where a block is one run of bytes."""
    if cache.shape[0] % num_blocks:
        raise LayoutError(f"layer {name!r} has {cache.shape[0]} blocks, which is no multiple of {num_blocks}")
    blocks = cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))  # type: ignore[no-untyped-call]
    if not _is_dense(blocks[0]):
        _check_heads(name, blocks)
        return blocks  # heads that lie outside the blocks: a run for each
    storage = cache.untyped_storage()
    slot_bytes = blocks.stride(0) * cache.element_size()
    offset = cache.data_ptr() - storage.data_ptr()
    if slot_bytes * num_blocks == storage.nbytes():
        offset = 0  # layers beside each other in one slot: all of it, whichever layer this is
    if offset + slot_bytes * num_blocks > storage.nbytes():
        raise LayoutError(
            f"layer {name!r} has {num_blocks} slots of {slot_bytes} bytes from byte {offset} on, past the end of its "
            f"storage of {storage.nbytes()} bytes: this KV cache layout is not supported"
        )
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return whole.set_(storage, offset, (num_blocks, slot_bytes), (slot_bytes, 1))


def _check_heads(name: str, blocks: torch.Tensor) -> None:
    """Refuses blocks in several runs, unless each is one head's and all blocks of a head follow each other."""
    head = blocks[:, 0]
    if not _is_dense(head[0]) or head.stride(0) != head[0].numel():
        raise LayoutError(
            f"layer {name!r} of shape {tuple(blocks.shape)} and strides {blocks.stride()} has blocks in several runs "
            "with other data between them: this KV cache layout is not supported"
        )


def _is_dense(block: torch.Tensor) -> bool:
    """Tells whether elements follow each other in memory without a gap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(block.stride(), block.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _refusals(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yields what is not supported, in words."""
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    num_groups = len(kv_cache_config.prefix_cacheable_groups)
    if vllm_config.model_config.enable_sleep_mode:
        yield "sleep mode: the store would go on using memory that was given back"
    if kv_cache_config.hisparse_host_num_blocks is not None:
        yield "HiSparse: its blocks lie on the host"
    if not num_groups:
        yield "a model without prefix-cacheable KV cache groups"
    if speculative is not None and speculative.use_eagle_block_drop():
        yield "speculative decoding that drops the last block of a hit"
    if parallel.prefill_context_parallel_size > 1 and num_groups > 1:
        yield "prefill context parallelism with several KV cache groups"
    if parallel.prefill_context_parallel_size > 1 and parallel.decode_context_parallel_size > 1:
        yield "prefill and decode context parallelism together"
    for group_id, group in zip(
        kv_cache_config.prefix_cacheable_group_ids, kv_cache_config.prefix_cacheable_groups, strict=True
    ):
        for reason in _group_refusals(group):
            yield f"KV cache group {group_id}: {reason}"


def _group_refusals(group: KVCacheGroupSpec) -> Iterator[str]:
    kinds = {type(spec) for spec in _layer_specs(group.kv_cache_spec)}
    for kind in kinds - {*FULL, *SLIDING}:
        reason = REASONS.get(kind.__name__)
        yield f"{kind.__name__}{f' ({reason})' if reason else ''}"
    if len({issubclass(kind, SLIDING) for kind in kinds}) > 1:
        yield "full and sliding-window layers in one group"
    if any(getattr(spec, "extra_retained_tokens", 0) for spec in _layer_specs(group.kv_cache_spec)):
        yield "sliding windows that retain extra tokens for speculative decoding"
    if group.is_eagle_group:
        yield "layers of a draft model that drops the last block of a hit"


def _layer_specs(spec: KVCacheSpec) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _group_of(spec: KVCacheSpec, tp_replicas: int) -> CacheGroup:
    first = _layer_specs(spec)[0]
    if isinstance(first, SLIDING):
        return CacheGroup.sliding_window(spec.block_size, first.sliding_window, tp_replicas=tp_replicas)
    return CacheGroup.full_attention(spec.block_size, tp_replicas=tp_replicas)


def _tp_replicas(spec: KVCacheSpec, tp_size: int, dcp_size: int, num_kv_heads: int) -> int:
    """Returns how many tensor-parallel ranks hold the same bytes of a group."""
    if dcp_size > 1:
        return 1
    if all(isinstance(layer, MLA) for layer in _layer_specs(spec)):
        return tp_size
    return max(1, tp_size // num_kv_heads)
