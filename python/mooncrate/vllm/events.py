"""Events that tell routers which blocks the pool has, and their way from all ranks to one publisher."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from vllm.distributed.kv_events import BlockStored, KVCacheEvent, KVConnectorKVEvents
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from mooncrate.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncrate.requests import ReqMeta
    from mooncrate.results import SaveResult
    from mooncrate.vllm.layout import EngineLayout

MEDIUM: Final = "cpu"
"""As in the events of vLLM's own connector."""
MAX_PENDING: Final = 65_536
"""Events that wait for other ranks. A rank that finds its part of a block in the pool never tells."""


def stored_blocks(req: ReqMeta, result: SaveResult, layout: EngineLayout) -> list[BlockStored]:
    """Returns an event for each chunk that a save put.

    Args:
        req: What was saved, with its token ids if events are to have them.
        result: What became of it, with its saved chunks.
        layout: The engine.
    """
    scale = {group_id: group.block_size // layout.hash_block_size for group_id, group in enumerate(layout.groups)}
    hashes, token_ids = req.block_hashes, req.token_ids or []
    events = []
    for group_id, chunk_id in result.saved_chunks:
        size = layout.groups[group_id].block_size
        start, first_hash = chunk_id * size, chunk_id * scale[group_id]
        parent = hashes[first_hash - 1] if first_hash else None
        events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[first_hash + scale[group_id] - 1])],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=token_ids[start : start + size],
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                group_idx=group_id,
            )
        )
    return events


class StoredEvents(KVConnectorKVEvents):
    """Events of several ranks; one is passed on when every rank that saves a part of its block has told it.

    Where ranks hold the same bytes only one of them saves a block, and so fewer have to tell.
    """

    def __init__(self, tp_replicas: Sequence[int], num_ranks: int = 1) -> None:
        """Begins without events.

        Args:
            tp_replicas: For each group, how many ranks hold the same bytes.
            num_ranks: Ranks whose events are collected here.
        """
        self._tp_replicas = tuple(tp_replicas)
        self._num_ranks = num_ranks
        self._counts: Counter[KVCacheEvent] = Counter()

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Adds the events of one rank; of too many that others never told the oldest go."""
        self._counts.update(events)
        for event in list(itertools.islice(self._counts, max(0, len(self._counts) - MAX_PENDING))):
            del self._counts[event]

    def aggregate(self) -> StoredEvents:
        """Keeps what all ranks have told, as if one had; of the rest nothing."""
        self._counts = Counter(self.pop_common())
        self._num_ranks = 1
        return self

    def pop_common(self) -> list[KVCacheEvent]:
        """Takes out the events that all have told whom they concern."""
        common = [event for event, number in self._counts.items() if number * self._replicas(event) >= self._num_ranks]
        for event in common:
            del self._counts[event]
        return common

    def increment_workers(self, count: int = 1) -> None:
        """Counts ranks in.

        Raises:
            LayoutError: Not one at least.
        """
        if count < 1:
            raise LayoutError(f"count is {count}, less than 1")
        self._num_ranks += count

    def get_all_events(self) -> list[KVCacheEvent]:
        """Returns every event, as often as it was told."""
        return list(self._counts.elements())

    def get_number_of_workers(self) -> int:
        """Returns how many ranks are counted in."""
        return self._num_ranks

    def clear_events(self) -> None:
        """Forgets all events, and all ranks but one."""
        self._counts.clear()
        self._num_ranks = 1

    def _replicas(self, event: KVCacheEvent) -> int:
        group_id = getattr(event, "group_idx", None)
        return 1 if group_id is None else self._tp_replicas[group_id]
