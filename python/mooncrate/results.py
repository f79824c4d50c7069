"""What became of a save or a load: counts, and a code for every chunk that failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class SkipReason(StrEnum):
    """Why a save did not look at the store, or stopped early without a fault."""

    QUEUE_FULL = "queue full"
    """More saves wait than the queue holds: the store is slower than the engine."""
    PRESSURE = "pressure"
    """The pool had no room a moment ago; saving goes on after a pause."""
    NOT_WANTED = "not wanted"
    """``ReqMeta.can_save`` is False."""
    NOTHING_TO_SAVE = "nothing to save"
    """No whole chunk, or none that this rank saves."""
    CLOSED = "closed"
    """The pool was closed before the save was done."""


class FailedChunk(NamedTuple):
    """A chunk that the store answered a code for."""

    group_id: int
    chunk_id: int
    code: int


@dataclass(frozen=True)
class SaveResult:
    """What became of a save.

    Chunks behind a failed one in the same group are not sent, since nobody could use them: they are in ``num_chunks``
    and nowhere else. The next save of the same prefix begins with them.

    Attributes:
        num_chunks: Chunks of the request that fall to this rank, in all groups, without null blocks.
        num_present: Chunks that the pool had.
        num_saved: Chunks that were put.
        num_bytes: Bytes of the chunks that were put.
        failed: Chunks that the store refused, in the order in which they were sent.
        skipped: Why nothing, or no more, was tried; None when all that was due was tried.
        num_null_blocks: Chunks that were left out because they lie in the null block.
        has_hole: Whether one of those is of a full-attention group, which nobody can load past.
        error: What the store raised, if it did; the chunks that were in that call are in ``failed``.
        saved_chunks: Group and chunk id of what was put, if the save was asked to list it.
    """

    num_chunks: int = 0
    num_present: int = 0
    num_saved: int = 0
    num_bytes: int = 0
    failed: tuple[FailedChunk, ...] = ()
    skipped: SkipReason | None = None
    num_null_blocks: int = 0
    has_hole: bool = False
    error: Exception | None = None
    saved_chunks: tuple[tuple[int, int], ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the pool has every chunk now that a load of the whole prefix needs of this rank."""
        is_tried = self.skipped in (None, SkipReason.NOTHING_TO_SAVE)
        return is_tried and not self.has_hole and self.num_present + self.num_saved == self.num_chunks


@dataclass(frozen=True)
class LoadResult:
    """What became of a load.

    Attributes:
        num_tokens: Length of the prefix that is good in every group, with what the engine held before: a multiple of
            every block size, or ``vllm_cached_tokens`` when nothing was added to those.
        num_bytes: Bytes of the chunks that arrived whole.
        failed_block_ids: Per group the blocks whose chunks did not arrive: those that failed, the rest of their call,
            and what was not asked for after it. What such a block holds is undefined.
        codes: How many chunks ended with each code; a chunk that was never asked for has none. A number that is not
            negative is a byte count that is not the one asked for.
        num_null_blocks: Chunks that had nowhere to go, because their block is the null block.
        error: What the store raised, if it did.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    failed_block_ids: tuple[frozenset[int], ...] = ()
    codes: Mapping[int, int] = field(default_factory=dict)
    num_null_blocks: int = 0
    error: Exception | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk that the prefix needs arrived."""
        return not any(self.failed_block_ids) and not self.num_null_blocks and self.error is None
