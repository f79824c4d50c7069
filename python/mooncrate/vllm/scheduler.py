"""The scheduler's side: what the pool has of a request, and what workers are to load and save at each step."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from mooncrate.errors import MooncrateError, StoreError
from mooncrate.requests import LoadSpec, ReqMeta, RequestTracker
from mooncrate.vllm.lookup import PrefixLookups
from mooncrate.vllm.metadata import SaveOrder, StepOrders, StepReport
from mooncrate.vllm.references import BlockReferences

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

    from mooncrate.pool import KVPool
    from mooncrate.vllm.layout import EngineLayout
    from mooncrate.vllm.settings import Settings

logger = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 5.0
NULL_BLOCK_ID: Final = 0


@dataclass
class _Entry:
    """A request that has blocks, from one allocation to the next preemption.

    Attributes:
        request: vLLM's own, which goes on changing.
        load: What is to be loaded and was not handed out yet.
        block_ids: Where to, if it is loaded beside the running requests.
        tracker: What was handed out for saving; None until the request is scheduled.
        num_pool_tokens: Tokens from the start that the pool has: found, or saved by every rank.
        num_preemptions: How often the request had lost its blocks when it got these.
    """

    request: Request
    num_preemptions: int
    load: LoadSpec | None = None
    block_ids: tuple[list[int], ...] = ()
    tracker: RequestTracker | None = None
    num_pool_tokens: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the request has lost these blocks."""
        return self.request.is_finished() or self.request.num_preemptions != self.num_preemptions


@dataclass
class _Save:
    """A save that is on its way.

    Attributes:
        entry: Whose it is; not that of the same request after a preemption.
        num_tokens: Tokens from the start that the pool has afterwards, if all ranks complete it.
        is_complete: Whether all that have reported did.
    """

    entry: _Entry
    num_tokens: int
    is_complete: bool = True


@dataclass
class SchedulerSide:
    """Everything that vLLM's scheduler calls. For one thread, as that is."""

    settings: Settings
    layout: EngineLayout
    pool: KVPool
    passes_token_ids: bool = False

    _lookups: PrefixLookups = field(init=False)
    _references: BlockReferences = field(init=False)

    def __post_init__(self) -> None:
        """Begins without requests."""
        self._lookups = PrefixLookups(self.pool, LOOKUP_SECONDS)
        self._references = BlockReferences(self.layout.num_ranks)
        self._found: dict[str, LoadSpec] = {}
        self._entries: dict[str, _Entry] = {}
        self._saves: dict[int, _Save] = {}
        self._job_ids = count()
        self._failed_loads: set[str] = set()
        self._is_reset = False
        self._saves_before_reset: set[int] = set()

    def bind(self, block_pool: BlockPool) -> None:
        """Tells whose blocks are kept alive."""
        self._references.bind(block_pool)

    @property
    def num_saves(self) -> int:
        """Saves that not every rank has reported."""
        return len(self._references)

    @property
    def num_referenced_blocks(self) -> int:
        """References on blocks that these hold."""
        return self._references.num_blocks

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered."""
        return len(self._entries.keys() | self._found.keys() | self._failed_loads)

    def num_new_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Returns how many tokens can be loaded beyond those that the engine has; None if it is not known yet."""
        req_id, unit = request.request_id, self.layout.block_size
        self._found.pop(req_id, None)
        most = (request.num_tokens - 1) // unit * unit
        is_wanted = self.settings.enable_lookup and not request.skip_reading_prefix_cache
        # What failed to load would be found again, and fail again, as long as the store believes that it has it.
        if not is_wanted or most <= num_computed_tokens or req_id in self._failed_loads:
            return 0
        try:
            num_hit_tokens = self._lookups.num_hit_tokens(request)
        except MooncrateError:
            logger.exception("the lookup of request %s failed and counts as 0 tokens", req_id)
            return 0
        if num_hit_tokens is None:
            return None
        if num_hit_tokens <= num_computed_tokens:
            return 0
        self._found[req_id] = LoadSpec(num_computed_tokens, num_hit_tokens, can_load=False)
        return num_hit_tokens - num_computed_tokens

    def allocate(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Takes note that a request has blocks.

        Called again, without external tokens, when a load is done.

        Args:
            request: The request.
            block_ids: Its block table in all of vLLM's groups.
            num_external_tokens: Tokens to load.
        """
        req_id = request.request_id
        self._lookups.forget(req_id)
        found = self._found.pop(req_id, None)
        entry = self._entries.get(req_id)
        if entry is None or entry.request is not request or entry.is_over:
            entry = self._entries[req_id] = _Entry(request, request.num_preemptions)
        if found is None or num_external_tokens == 0:
            return
        if num_external_tokens != found.kvpool_cached_tokens - found.vllm_cached_tokens:
            # Another connector's, or cut short by vLLM: only what was found is known to be there.
            logger.debug("request %s loads %d tokens, not what was found: %s", req_id, num_external_tokens, found)
            return
        found.can_load = True
        entry.load = found
        entry.block_ids = self._own(block_ids)

    def orders(self, output: SchedulerOutput) -> StepOrders:
        """Returns what the workers do in this step."""
        self._lookups.begin_step()
        # A request may have come back, under the same name, in the very step that says it was gone.
        for req_id in output.finished_req_ids:
            if req_id not in self._entries or self._entries[req_id].is_over:
                self.forget(req_id)
        for req_id in output.preempted_req_ids or ():
            if req_id in self._entries and self._entries[req_id].is_over:
                del self._entries[req_id]
        orders = StepOrders(is_idle=not output.total_num_scheduled_tokens, drops_saves=self._is_reset)
        self._is_reset = False
        scheduled = set()
        for entry, num_computed_tokens, is_saved in self._scheduled(output):
            req_id = entry.request.request_id
            scheduled.add(req_id)
            if (load := self._load_order(entry)) is not None:
                orders.loads.append(load)
            elif is_saved and (save := self._save_order(entry, num_computed_tokens, output)) is not None:
                orders.saves.append(save)
        for req_id, entry in self._entries.items():
            if req_id not in scheduled and (load := self._load_order(entry)) is not None:
                orders.loads.append(load)
        return orders

    def note(self, report: StepReport) -> None:
        """Takes note of what the ranks have done."""
        self._failed_loads |= report.failed_loads & self._entries.keys()
        for req_id in report.failed_loads & self._entries.keys():
            self._entries[req_id].num_pool_tokens = 0
        for job_id, num_ranks in report.ended_saves.items():
            save = self._saves[job_id]
            save.is_complete &= job_id not in report.incomplete_saves
            if self._references.report(job_id, num_ranks):
                del self._saves[job_id]
                if save.is_complete and job_id not in self._saves_before_reset:
                    save.entry.num_pool_tokens = max(save.entry.num_pool_tokens, save.num_tokens)
        if self._saves_before_reset and not self._saves_before_reset & self._saves.keys():
            self._saves_before_reset.clear()
            threading.Thread(target=self._remove_all, name="mooncrate-reset", daemon=True).start()

    def forget(self, req_id: str) -> None:
        """Drops everything about a request. Its saves go on, with their own references."""
        self._found.pop(req_id, None)
        self._entries.pop(req_id, None)
        self._failed_loads.discard(req_id)
        self._lookups.forget(req_id)

    def reset(self) -> bool:
        """Removes what this deployment has in the pool; returns whether that worked.

        Saves that wait in the workers are given up at the next step. What those that run put after this call is
        removed when the last of them has ended.
        """
        self._lookups.clear()
        self._found.clear()
        for entry in self._entries.values():
            entry.num_pool_tokens = 0
        self._is_reset = True
        self._saves_before_reset = self._references.job_ids()
        return self._remove_all()

    def _remove_all(self) -> bool:
        try:
            logger.info("reset: %d objects removed", self.pool.reset())
        except StoreError:
            logger.exception("reset failed")
            return False
        return True

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[_Entry, int, bool]]:
        """Yields requests of this step, how many of their tokens are computed after it, and whether to save them."""
        for new in output.scheduled_new_reqs:
            entry = self._entries[new.req_id]
            num_computed = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            entry.tracker = _new_tracker(new.req_id, entry, _num_prefill_tokens(new))
            yield entry, num_computed, self.settings.saves_prefill
        cached = output.scheduled_cached_reqs
        for req_id, num_before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id not in self._entries:
                logger.warning("request %s is computed, but was never given blocks: it is not saved", req_id)
                continue
            entry = self._entries[req_id]
            if entry.tracker is None or req_id in cached.resumed_req_ids:
                entry.tracker = _new_tracker(req_id, entry, entry.request.num_tokens)
            is_prefill = num_before < entry.tracker.prefill_end_tokens
            is_saved = self.settings.saves_prefill if is_prefill else self.settings.save_decode_cache
            yield entry, num_before + output.num_scheduled_tokens[req_id], is_saved

    def _load_order(self, entry: _Entry) -> ReqMeta | None:
        if entry.load is None:
            return None
        spec, entry.load = entry.load, None
        entry.num_pool_tokens = spec.kvpool_cached_tokens
        return ReqMeta(
            req_id=entry.request.request_id,
            token_len_chunk=0,
            block_ids=entry.block_ids,
            block_hashes=_hashes_for(entry.request, spec.kvpool_cached_tokens, self.layout.hash_block_size),
            can_save=False,
            load_spec=spec,
        )

    def _save_order(self, entry: _Entry, num_computed_tokens: int, output: SchedulerOutput) -> SaveOrder | None:
        """Returns a save if this step completes a block that was not handed out before."""
        request, tracker = entry.request, entry.tracker
        if tracker is None:
            return None
        # Drafts that were not accepted yet are computed too, but have no place in a hash.
        num_tokens = min(
            num_computed_tokens, request.num_tokens, len(request.block_hashes) * self.layout.hash_block_size
        )
        tracker.token_len = max(tracker.token_len, num_tokens)
        tracker.num_saved_tokens = max(tracker.num_saved_tokens, entry.num_pool_tokens)
        if tracker.token_len // self.layout.block_size * self.layout.block_size <= tracker.num_saved_tokens:
            return None
        block_state = output.kv_connector_block_state
        tables = None if block_state is None else block_state.get_block_ids(request.request_id)
        if tables is None:
            raise MooncrateError(f"vLLM does not say where the blocks of request {request.request_id} lie")
        tracker.allocated_block_ids = self._own(tables)
        if self.passes_token_ids:
            tracker.token_ids = list(request.all_token_ids[: tracker.token_len])
        hashes = _hashes_for(request, tracker.token_len, self.layout.hash_block_size)
        req = ReqMeta.from_request_tracker(tracker, self.layout.block_size, block_hashes=hashes)
        if req is None:
            return None
        job_id = next(self._job_ids)
        self._references.take(job_id, self._blocks_read(req, entry.num_pool_tokens))
        self._saves[job_id] = _Save(entry, req.token_len_chunk)
        return SaveOrder(job_id, req, entry.num_pool_tokens)

    def _blocks_read(self, req: ReqMeta, num_saved_tokens: int) -> Iterator[int]:
        for group, block_ids in zip(self.layout.groups, req.block_ids, strict=True):
            size = group.block_size
            for block_id in block_ids[num_saved_tokens // size : -(-req.token_len_chunk // size)]:
                if block_id != NULL_BLOCK_ID:
                    yield block_id

    def _own(self, tables: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Picks the block tables of the groups that are saved."""
        return tuple(list(tables[group_id]) for group_id in self.layout.group_ids)


def _new_tracker(req_id: str, entry: _Entry, prefill_end_tokens: int) -> RequestTracker:
    return RequestTracker(
        req_id,
        token_len=0,
        allocated_block_ids=(),
        num_saved_tokens=entry.num_pool_tokens,
        prefill_end_tokens=prefill_end_tokens,
    )


def _num_prefill_tokens(new: NewRequestData) -> int:
    """Returns how many tokens a new request prefills; after a preemption these are all that it had."""
    if new.prefill_token_ids is not None:
        return len(new.prefill_token_ids)
    return new.prompt_len


def _hashes_for(request: Request, num_tokens: int, hash_block_size: int) -> list[bytes]:
    """Returns the hashes of a prefix, in a list of its own: that of the request goes on growing."""
    return list(request.block_hashes[: num_tokens // hash_block_size])
