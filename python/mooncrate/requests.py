"""What a scheduler tells a worker about requests: trackers, and the snapshots made from them.

The names, fields and rules are those of the reference API. Metadata handed out is a snapshot: a tracker that goes on
changing does not change it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

logger = logging.getLogger(__name__)


@dataclass
class LoadSpec:
    """What to load from the pool for one request, in tokens from the start of its prompt.

    Attributes:
        vllm_cached_tokens: Tokens that the engine's own prefix cache already holds.
        kvpool_cached_tokens: Tokens that the pool holds.
        can_load: Whether blocks were allocated for the tokens in between.
        token_len: Tokens to process.
    """

    vllm_cached_tokens: int
    kvpool_cached_tokens: int
    can_load: bool
    token_len: int = 0


@dataclass
class RequestTracker:
    """State of one request across scheduler steps.

    Attributes:
        req_id: The engine's name of the request.
        token_len: Tokens scheduled so far.
        allocated_block_ids: The block table of each KV cache group.
        num_saved_tokens: Tokens already handed out for saving.
        token_ids: Tokens of the request, when the engine wants them passed on.
        has_pending_offload: Whether a partial tail waits to be saved.
        prefill_end_tokens: Tokens to prefill, fixed when the tracker is made; after a preemption this includes what
            had been generated.
    """

    req_id: str
    token_len: int
    allocated_block_ids: tuple[list[int], ...]
    num_saved_tokens: int = 0
    token_ids: list[int] | None = None
    has_pending_offload: bool = False
    prefill_end_tokens: int = 0

    def reset(self) -> None:
        """Forget everything but the name: the request was preempted and its blocks are gone."""
        self.token_len = 0
        self.allocated_block_ids = ()
        self.num_saved_tokens = 0
        self.token_ids = None
        self.has_pending_offload = False
        self.prefill_end_tokens = 0

    def update(self, new_block_ids: tuple[list[int], ...] | list[int]) -> None:
        """Append newly allocated blocks.

        Args:
            new_block_ids: New block ids of each group; a plain list stands for one group.

        Raises:
            ValueError: The number of groups is not the tracker's.
        """
        groups = (new_block_ids,) if isinstance(new_block_ids, list) else new_block_ids
        num_groups = len(self.allocated_block_ids)
        if len(groups) != num_groups:
            raise ValueError(
                f"request {self.req_id} has block tables for {num_groups} KV cache groups, "
                f"got new blocks for {len(groups)}"
            )
        for block_ids, new in zip(self.allocated_block_ids, groups, strict=True):
            if new:
                block_ids.extend(new)


@dataclass
class ReqMeta:
    """What a worker needs to save or load one request.

    Attributes:
        req_id: The engine's name of the request.
        token_len_chunk: Tokens to save, in whole blocks.
        block_ids: The block table of each KV cache group, as it was when this was made.
        block_hashes: The request's block hashes; shared with the request, which only ever appends to them.
        can_save: Whether to save.
        load_spec: What to load, if anything. Saving and loading never go together.
        is_last_chunk: Whether this completes the prefill.
        current_event: Device event to wait for before reading blocks.
        token_ids: Tokens of the request, as they were when this was made.
        num_prompt_tokens: Tokens to prefill.
        partial_tail_offloads: ``(group_id, block_id, boundary_tokens)`` of partial tails to save.
    """

    req_id: str
    token_len_chunk: int
    block_ids: tuple[list[int], ...]
    block_hashes: Sequence[bytes | memoryview]

    can_save: bool | None = None
    load_spec: LoadSpec | None = None
    is_last_chunk: bool | None = None
    current_event: torch.cuda.Event | None = None

    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    partial_tail_offloads: list[tuple[int, int, int]] | None = None

    @staticmethod
    def from_request_tracker(
        tracker: RequestTracker,
        block_size: int,
        load_spec: LoadSpec | None = None,
        skip_save: bool | None = False,
        block_hashes: Sequence[bytes | memoryview] | None = None,
        is_last_chunk: bool | None = None,
    ) -> ReqMeta | None:
        """Decide what this step saves or loads, and take a snapshot for it.

        A save is due when the tokens scheduled so far complete a block that was not handed out before; the tracker is
        told. A load takes the place of a save: what is being loaded is in the pool already.

        Args:
            tracker: The request.
            block_size: Tokens per block.
            load_spec: What could be loaded.
            skip_save: Whether saving is off.
            block_hashes: The request's block hashes.
            is_last_chunk: Passed on.

        Returns:
            ``None`` when there is nothing to do.
        """
        can_load = load_spec is not None and load_spec.can_load
        num_full_tokens = tracker.token_len // block_size * block_size
        next_boundary = (tracker.num_saved_tokens // block_size + 1) * block_size
        can_save = bool(not skip_save and not can_load and num_full_tokens >= next_boundary)
        if not can_save and load_spec is None:
            return None
        if can_save:
            tracker.num_saved_tokens = num_full_tokens
        if not can_load:
            load_spec = None
        logger.debug("request %s: save %s, load %s", tracker.req_id, num_full_tokens if can_save else None, load_spec)
        return ReqMeta(
            req_id=tracker.req_id,
            token_len_chunk=num_full_tokens,
            block_ids=tuple(list(block_ids) for block_ids in tracker.allocated_block_ids),
            block_hashes=[] if block_hashes is None else block_hashes,
            can_save=can_save,
            load_spec=load_spec,
            is_last_chunk=is_last_chunk,
            token_ids=list(tracker.token_ids) if tracker.token_ids else None,
            num_prompt_tokens=tracker.prefill_end_tokens,
        )


class MooncakeStoreConnectorMetadata:
    """Everything that one scheduler step tells the workers.

    Args:
        unfinished_request_ids: Requests that are still known to the scheduler.
        preempted_req_ids: Requests that lost their blocks in this step.

    Attributes:
        requests: What to save or load, in order.
    """

    def __init__(self, unfinished_request_ids: Iterable[str], preempted_req_ids: Iterable[str]) -> None:
        """See the class."""
        self.requests: list[ReqMeta] = []
        self.unfinished_request_ids = set(unfinished_request_ids)
        self.preempted_req_ids = set(preempted_req_ids)

    def add_request(self, req_meta: ReqMeta) -> None:
        """Append what to do for one request."""
        self.requests.append(req_meta)
