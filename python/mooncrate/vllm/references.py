"""Blocks that saves still read, held by the number of the save: requests come back under the same name, jobs do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncrate.errors import MooncrateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.block_pool import BlockPool


class BlockReferences:
    """References on blocks of the engine, each until all ranks have reported its save. For one thread."""

    def __init__(self, num_ranks: int) -> None:
        """Begins without references.

        Args:
            num_ranks: Ranks that report each save.
        """
        self._num_ranks = num_ranks
        self._block_pool: BlockPool | None = None
        self._held: dict[int, tuple[list[int], int]] = {}

    def bind(self, block_pool: BlockPool) -> None:
        """Tells whose blocks they are."""
        self._block_pool = block_pool

    def __len__(self) -> int:
        """Returns how many saves are on their way."""
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """References that are held."""
        return sum(len(block_ids) for block_ids, _ in self._held.values())

    def job_ids(self) -> set[int]:
        """Returns the saves that are on their way."""
        return set(self._held)

    def take(self, job_id: int, block_ids: Iterable[int]) -> None:
        """Keeps blocks alive for a save."""
        pool = self._pool()
        kept = list(dict.fromkeys(block_ids))
        pool.touch([pool.blocks[block_id] for block_id in kept])
        self._held[job_id] = kept, self._num_ranks

    def report(self, job_id: int, num_ranks: int) -> bool:
        """Notes that ranks are done with a save; returns whether these were the last.

        Raises:
            MooncrateError: More ranks than there are: somewhere jobs are confused, and blocks with them.
        """
        if job_id not in self._held:
            raise MooncrateError(f"save {job_id} was reported, but is not on its way")
        block_ids, num_left = self._held[job_id]
        num_left -= num_ranks
        if num_left < 0:
            raise MooncrateError(f"save {job_id} was reported by {-num_left} ranks more than there are")
        if num_left:
            self._held[job_id] = block_ids, num_left
            return False
        del self._held[job_id]
        pool = self._pool()
        pool.free_blocks(pool.blocks[block_id] for block_id in reversed(block_ids))  # the shared prefix goes last
        return True

    def _pool(self) -> BlockPool:
        if self._block_pool is None:
            raise MooncrateError("a save was due before vLLM named its block pool")
        return self._block_pool
