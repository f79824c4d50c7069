"""`MooncrateConnector`, what vLLM loads by name: one object in the scheduler's process, and one in each worker's.

# Rationale
vLLM makes both from the same class and tells them apart by a role. Each call is one line here, to the side that it
belongs to: `SchedulerSide` decides, `WorkerSide` moves, and neither knows of the other but through what vLLM carries.

# Limitations
Refused at start, each with its name: recurrent layers, cross attention, chunked local attention, drafts that drop the
last block of a hit, sleep mode, HiSparse, layouts with foreign data inside a block, and the options of
`mooncrate.vllm.settings.UNSUPPORTED`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from mooncrate import mooncake
from mooncrate.config import StoreConfig
from mooncrate.errors import ConfigError, MooncrateError, StoreError
from mooncrate.pacing import PoolLimits
from mooncrate.pool import KVPool
from mooncrate.vllm.events import StoredEvents
from mooncrate.vllm.layout import EngineLayout, topology_of
from mooncrate.vllm.metadata import StepOrders, StepReport
from mooncrate.vllm.metrics import MooncratePromMetrics, MooncrateStats, StatsSource
from mooncrate.vllm.scheduler import SchedulerSide
from mooncrate.vllm.settings import Settings
from mooncrate.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from mooncrate.config import StoreConnection

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 10.0
LOAD_THREADS_VARIABLE: Final = "VLLM_MOONCAKE_LOAD_RECV_THREADS"
MAX_QUEUED_LOADS: Final = 1 << 20
"""More than an engine has requests: a step must not wait for room in a queue."""


class MooncrateConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of a vLLM engine in a Mooncake pool."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Checks what was set and connects to the pool that ``MOONCAKE_CONFIG_PATH`` describes.

        Raises:
            ConfigError: Settings that cannot be meant.
            LayoutError: A model or a parallel layout that is not supported.
            StoreError: The pool cannot be reached.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = Settings.of(vllm_config)
        events_config = vllm_config.kv_events_config
        self._has_events = events_config is not None and bool(events_config.enable_kv_cache_events)
        self._connection: StoreConnection | None = None
        self._pool: KVPool | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._events: StoredEvents | None = None
        self._stats = StatsSource()
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if self._settings.is_capacity_only:
            if not is_scheduler:
                self._connection = StoreConfig.from_env().connect()
            return
        self._layout = EngineLayout.of(vllm_config, kv_cache_config)
        _check_sync_loads(self._settings, self._layout)
        if is_scheduler:
            self._open_scheduler(vllm_config)
        else:
            self._open_worker(vllm_config)

    def shutdown(self) -> None:
        """Ends all jobs and disconnects. Idempotent."""
        try:
            if self._pool is not None:
                self._pool.close(CLOSE_SECONDS)
            if self._connection is not None:
                self._connection.close(CLOSE_SECONDS)
        except StoreError:
            logger.exception("the pool could not be closed in good order")

    # The scheduler's side

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing that is not saved is missed by anybody: it is computed again."""
        return False

    @property
    def num_jobs(self) -> int:
        """Saves and loads that are on their way, as far as this side knows."""
        if self._scheduler_side is not None:
            return self._scheduler_side.num_saves
        return 0 if self._worker_side is None else self._worker_side.num_jobs

    @property
    def num_referenced_blocks(self) -> int:
        """References on the engine's blocks that saves hold."""
        return 0 if self._scheduler_side is None else self._scheduler_side.num_referenced_blocks

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Takes the blocks that saves keep alive."""
        if self._scheduler_side is not None:
            self._scheduler_side.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many more tokens the pool has, None while that is not known, and whether loading takes steps."""
        if self._scheduler_side is None:
            return 0, False
        num_tokens = self._scheduler_side.num_new_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens) and self._settings.load_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Takes note of blocks, and of what is to be loaded into them."""
        if self._scheduler_side is not None:
            block_ids = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler_side.allocate(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """Returns what workers do in this step."""
        return StepOrders() if self._scheduler_side is None else self._scheduler_side.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes note of what workers did."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler_side is not None and isinstance(report, StepReport):
            self._scheduler_side.note(report)
        events = connector_output.kv_cache_events
        if self._events is not None and isinstance(events, StoredEvents):
            self._events.add_events(events.get_all_events())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request; blocks that are still read have references of their own."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - vLLM's signature
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        if self._scheduler_side is not None:
            self._scheduler_side.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keeps vLLM stepping until all saves have been reported, and their blocks given back."""
        return self._scheduler_side is not None and self._scheduler_side.num_saves > 0

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns events that all ranks have told since the last call."""
        return () if self._events is None else self._events.pop_common()

    def reset_cache(self) -> bool | None:
        """Removes what this deployment has in the pool, whatever others have there. Generation should be paused."""
        if self._scheduler_side is None:
            return None
        if self._events is not None:
            self._events.clear_events()
        return self._scheduler_side.reset()

    # The workers' side

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Makes the KV cache known to the store."""
        if self._worker_side is not None:
            self._worker_side.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 - vLLM's signature
        """Starts the loads of this step."""
        if self._worker_side is not None:
            self._worker_side.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests are loaded as a whole before they are computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Does nothing: blocks are saved as a whole after the step."""

    def wait_for_save(self) -> None:
        """Starts the saves of this step."""
        if self._worker_side is not None:
            self._worker_side.start_saves(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns no sent requests, since none waits for that, and those whose load has ended."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Returns requests whose load has ended, and which of them have to be computed from the start."""
        if self._worker_side is None:
            return KVConnectorTransferResults()
        if self._orders().is_idle:
            self._worker_side.wait_for_any()
        loaded, failed = self._worker_side.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks that have to be computed; only of models with one group."""
        return set() if self._worker_side is None else self._worker_side.take_failed_block_ids()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Returns what the scheduler's side has to know."""
        return None if self._worker_side is None else self._worker_side.take_report()

    def get_kv_connector_kv_cache_events(self) -> StoredEvents | None:
        """Returns events of what this rank saved."""
        if self._worker_side is None or not self._has_events or not (new := self._worker_side.take_events()):
            return None
        events = StoredEvents([group.tp_replicas for group in self._layout.groups])
        events.add_events(new)
        return events

    # Both sides

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns what was added to this side's numbers since the last call."""
        return None if self._pool is None else self._stats.take(self._pool.metrics())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Returns numbers that came from another process as an object."""
        return MooncrateStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Returns what exports the numbers."""
        return MooncratePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        if not isinstance(orders, StepOrders):
            raise MooncrateError(f"the scheduler sent a {type(orders).__name__}: it runs another connector")
        return orders

    def _open_scheduler(self, vllm_config: VllmConfig) -> None:
        """Connects a client that gives no memory."""
        layout = self._layout
        self._connection = StoreConfig.from_env().connect(contributes_memory=False)
        self._pool = KVPool.open(
            store=self._connection.store,
            model_name=layout.model_name,
            groups=layout.groups,
            hash_block_size=layout.hash_block_size,
            topology=topology_of(vllm_config),
            cache_prefix=self._settings.cache_prefix,
        )
        self._scheduler_side = SchedulerSide(self._settings, layout, self._pool, passes_token_ids=self._has_events)
        if self._has_events:
            self._events = StoredEvents([group.tp_replicas for group in layout.groups], layout.num_ranks)

    def _open_worker(self, vllm_config: VllmConfig) -> None:
        """Connects a client that gives what the configuration says."""
        layout, segment = self._layout, self._settings.preferred_segment
        self._pool = KVPool.open(
            StoreConfig.from_env(),
            model_name=layout.model_name,
            groups=layout.groups,
            hash_block_size=layout.hash_block_size,
            topology=_own_topology(vllm_config),
            cache_prefix=self._settings.cache_prefix,
            put_config=None if segment is None else mooncake.replicate_config(preferred_segment=segment),
            limits=PoolLimits(num_load_threads=_num_load_threads(), max_queued_loads=MAX_QUEUED_LOADS),
        )
        self._worker_side = WorkerSide(
            self._pool, layout, load_async=self._settings.load_async, has_events=self._has_events
        )


def _own_topology(vllm_config: VllmConfig) -> Any:  # noqa: ANN401
    """Returns where this process stands; only vLLM's process groups know."""
    from vllm.distributed import get_pcp_group, get_tensor_model_parallel_rank  # noqa: PLC0415

    parallel = vllm_config.parallel_config
    pcp_rank = get_pcp_group().rank_in_group if parallel.prefill_context_parallel_size > 1 else 0
    return topology_of(vllm_config, tp_rank=get_tensor_model_parallel_rank(), pcp_rank=pcp_rank, rank=parallel.rank)


def _check_sync_loads(settings: Settings, layout: EngineLayout) -> None:
    """Refuses loads within a step where vLLM takes no word of one that failed."""
    if not settings.load_async and not layout.is_full_attention_alone:
        raise ConfigError(
            "kv_connector_extra_config: load_async: false: not supported for models with several KV cache groups or "
            "sliding windows alone: vLLM could not recompute what failed to load"
        )


def _num_load_threads() -> int:
    """Returns how many loads may run at once: what vLLM's own connector is told, or our default."""
    text = os.environ.get(LOAD_THREADS_VARIABLE, "").strip()
    if not text:
        return PoolLimits().num_load_threads
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{LOAD_THREADS_VARIABLE}: {text!r}: not a number of threads")
    return int(text)
