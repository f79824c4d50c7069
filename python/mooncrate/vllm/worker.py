"""A worker's side: does what the scheduler ordered, and says what became of it."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from mooncrate.errors import MooncrateError
from mooncrate.vllm.events import stored_blocks
from mooncrate.vllm.layout import block_views
from mooncrate.vllm.metadata import StepReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from vllm.distributed.kv_events import BlockStored

    from mooncrate.jobs import Result
    from mooncrate.pool import KVPool
    from mooncrate.requests import ReqMeta
    from mooncrate.results import LoadResult, SaveResult
    from mooncrate.transfers import DeviceEvent
    from mooncrate.vllm.layout import EngineLayout
    from mooncrate.vllm.metadata import SaveOrder, StepOrders

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 0.002
"""How long a step that computes nothing waits for a job to end; vLLM would only come back at once."""


class WorkerSide:
    """Everything that a worker of vLLM calls. For one thread, as that is; jobs end in threads of the pool."""

    def __init__(
        self, pool: KVPool, layout: EngineLayout, *, load_async: bool = True, has_events: bool = False
    ) -> None:
        """Begins without jobs.

        Args:
            pool: The pool.
            layout: The engine.
            load_async: Whether loads end in steps after the one that ordered them.
            has_events: Whether saved blocks are listed, for `take_events`.
        """
        self._pool = pool
        self._layout = layout
        self._load_async = load_async
        self._has_events = has_events
        # Only of a full-attention group alone does a shorter prefix stay good; vLLM forgets the request's others whole.
        self._reports_blocks = layout.is_full_attention_alone
        self._ended = threading.Condition()  # guards all that follows
        self._report = StepReport()
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._events: list[BlockStored] = []
        self._saves: dict[int, Future[SaveResult]] = {}
        self._num_loads = 0

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Tells the pool where the KV cache lies."""
        views = block_views(kv_caches, self._layout)
        self._pool.register_kv_caches(views, self._layout.num_blocks, block_dim=0)

    def start_loads(self, orders: StepOrders) -> None:
        """Starts the loads of a step; without ``load_async`` it also waits for them."""
        event = _record_event() if orders.loads else None
        jobs = [job for req in orders.loads if (job := self._start_load(req, event)) is not None]
        if not self._load_async:
            for job in jobs:
                job.exception()  # waits, and does not raise: `_end_load` has it

    def start_saves(self, orders: StepOrders) -> None:
        """Starts the saves of a step."""
        if orders.drops_saves:
            with self._ended:
                waiting = list(self._saves.values())
            for job in waiting:
                job.cancel()
        event = _record_event() if orders.saves else None
        for order in orders.saves:
            try:
                job = self._pool.save(
                    order.req,
                    event=event,
                    num_saved_tokens=order.num_saved_tokens,
                    lists_saved=self._has_events,
                    chunk_mask=partial(self._layout.chunk_mask, order.req.num_prompt_tokens or 0),
                )
            except MooncrateError:  # the engine goes on without the pool
                logger.exception("the save of request %s could not be started", order.req.req_id)
                self._end_save(order, None)
                continue
            with self._ended:
                self._saves[order.job_id] = job
            job.add_done_callback(partial(self._end_save, order))

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Returns requests whose load has ended since the last call, and which of them failed as a whole."""
        with self._ended:
            loaded, failed, self._loaded, self._failed = self._loaded, self._failed, set(), set()
        return (loaded, failed) if self._load_async else (set(), set())

    def take_failed_block_ids(self) -> set[int]:
        """Returns blocks that were not loaded, of loads that `take_loaded` has given or will give."""
        with self._ended:
            failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_events(self) -> list[BlockStored]:
        """Returns an event for each block that was saved since the last call."""
        with self._ended:
            events, self._events = self._events, []
        return events

    def take_report(self) -> StepReport | None:
        """Returns what the scheduler has to know of what ended since the last call."""
        with self._ended:
            report, self._report = self._report, StepReport()
        return report if report.ended_saves or report.failed_loads else None

    def wait_for_any(self) -> None:
        """Waits a moment for a job to end, if there are any and none has ended since the last report."""
        with self._ended:
            if (self._saves or self._num_loads) and not self._report.ended_saves and not self._loaded:
                self._ended.wait(IDLE_SECONDS)

    @property
    def num_jobs(self) -> int:
        """Saves and loads that have not ended."""
        with self._ended:
            return len(self._saves) + self._num_loads

    def _start_load(self, req: ReqMeta, event: DeviceEvent | None) -> Future[LoadResult] | None:
        with self._ended:
            self._num_loads += 1
        try:
            job = self._pool.load(req, event=event)
        except MooncrateError:  # the engine computes it instead
            logger.exception("the load of request %s could not be started", req.req_id)
            self._end_load(req, None)
            return None
        job.add_done_callback(partial(self._end_load, req))
        return job

    def _end_load(self, req: ReqMeta, job: Future[LoadResult] | None) -> None:
        result = _result_of(job)
        with self._ended:
            self._num_loads -= 1
            if result is None or not result.is_complete:
                self._report.failed_loads.add(req.req_id)
                if self._reports_blocks:
                    self._failed_block_ids |= self._unloaded_blocks(req, result)
                else:
                    self._failed.add(req.req_id)
            self._loaded.add(req.req_id)
            self._ended.notify_all()

    def _unloaded_blocks(self, req: ReqMeta, result: LoadResult | None) -> set[int]:
        """Returns the blocks of a single group that a load did not fill; all of them if it does not say."""
        if result is not None and result.failed_block_ids and result.failed_block_ids[0]:
            return set(result.failed_block_ids[0])
        spec, size = req.load_spec, self._layout.groups[0].block_size
        if spec is None:
            return set()
        return set(req.block_ids[0][spec.vllm_cached_tokens // size : spec.kvpool_cached_tokens // size])

    def _end_save(self, order: SaveOrder, job: Future[SaveResult] | None) -> None:
        result = _result_of(job)
        events = [] if result is None else stored_blocks(order.req, result, self._layout)
        with self._ended:
            self._saves.pop(order.job_id, None)
            self._report.ended_saves[order.job_id] = self._report.ended_saves.get(order.job_id, 0) + 1
            if result is None or not result.is_complete:
                self._report.incomplete_saves.add(order.job_id)
            self._events += events
            self._ended.notify_all()


def _result_of(job: Future[Result] | None) -> Result | None:
    """Returns what became of a job that has ended; None if it never began, was cancelled, or failed."""
    return None if job is None or job.cancelled() or job.exception() is not None else job.result()


def _record_event() -> DeviceEvent | None:
    """Returns an event behind all that the device was told so far; None where nothing runs beside the CPU."""
    if not torch.accelerator.is_available():
        return None
    event = torch.Event(device=torch.accelerator.current_accelerator())
    event.record()
    return event
