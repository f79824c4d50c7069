"""What a save and a load do, step by step, in a worker's thread."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from mooncrate.groups import GroupKind
from mooncrate.metrics import Count
from mooncrate.results import FailedChunk, LoadResult, SaveResult, SkipReason
from mooncrate.store import ResultClass, classify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncrate import _core
    from mooncrate.groups import CacheGroup
    from mooncrate.pacing import Backoff
    from mooncrate.transfers import Channel, RegisteredGroup, Request, Work


class SaveWorker:
    """Saves requests: what is missing, in prefix order, up to the first hole of each group."""

    def __init__(self, channel: Channel, backoff: Backoff) -> None:
        """Makes a worker; all that save at once share the pause."""
        self._channel = channel
        self._backoff = backoff

    def save(self, request: Request) -> SaveResult:
        """Does one job.

        Raises:
            MooncrateError: The request contradicts itself or the registered memory.
            IndexError: A block table is too short.
            Exception: What an event raises.
        """
        channel, recorder = self._channel, self._channel.recorder
        recorder.add(Count.SAVES)
        if channel.is_stopped():
            return SaveResult(skipped=SkipReason.CLOSED)
        if self._backoff.is_paused():
            recorder.add(Count.SAVES_PAUSED)
            return SaveResult(skipped=SkipReason.PRESSURE)
        num_tokens = request.num_tokens // channel.unit * channel.unit
        group_ids = itertools.count()

        def plan_of(group: RegisteredGroup, block_ids: tuple[int, ...]) -> _core.TransferPlan:
            group_id, size = next(group_ids), group.group.block_size
            first = request.num_cached_tokens // size  # a chunk of which the pool has a part only is saved whole
            mask = None if request.chunk_mask is None else request.chunk_mask(group_id, first, num_tokens // size)
            return group.database.plan(
                num_tokens,
                request.block_hashes,
                block_ids,
                mask_num=first * size,
                chunk_mask=mask,
                put_step=group.put_step,
                put_step_rank=group.put_step_rank,
                null_block_id=channel.null_block_id,
            )

        save = _Save(channel.plan(request, plan_of), self._backoff, request.lists_saved)
        if not len(save.work.plan):
            return save.result(SkipReason.NOTHING_TO_SAVE)
        missing = save.find_missing()
        if not missing:
            return save.result(None)
        for event in request.events:
            event.synchronize()
        return save.result(save.put(missing))


class _Save:
    """The state of one save."""

    def __init__(self, work: Work, backoff: Backoff, lists_saved: bool) -> None:
        self.work: Final = work
        self._channel = work.channel
        self._backoff = backoff
        self._saved: list[int] | None = [] if lists_saved else None
        self._num_present = 0
        self._num_saved = 0
        self._num_bytes = 0
        self._failed: list[FailedChunk] = []
        self._holes: set[int] = set()
        self._error: Exception | None = None

    def result(self, skipped: SkipReason | None) -> SaveResult:
        """Sums up."""
        return SaveResult(
            num_chunks=len(self.work.plan),
            num_present=self._num_present,
            num_saved=self._num_saved,
            num_bytes=self._num_bytes,
            failed=tuple(self._failed),
            skipped=skipped,
            num_null_blocks=self.work.num_null_blocks,
            has_hole=self.work.has_hole,
            error=self._error,
            saved_chunks=tuple(map(self.work.chunk, self._saved or ())),
        )

    def find_missing(self) -> list[int]:
        """Asks what is there; returns the indices of what is not, up to the first failure of each group."""
        answers, error = self._channel.exists(self.work.plan.keys)
        self._error = error
        self._num_present = sum(answer == 1 for answer in answers)
        self._channel.recorder.add(Count.PRESENT_KEYS, self._num_present)
        self._note_failures([(index, answer) for index, answer in enumerate(answers) if answer < 0])
        missing = [index for index, answer in enumerate(answers) if answer != 1]
        return self._before_holes(missing, {index for index, answer in enumerate(answers) if answer < 0})

    def put(self, missing: Sequence[int]) -> SkipReason | None:
        """Puts chunks in batches; returns why it stopped early, if it did."""
        position = 0
        for batch in self._channel.batches(self.work.plan.select(missing)):
            indices = missing[position : position + len(batch)]
            position += len(batch)
            if self._holes:
                indices = [index for index in indices if self.work.group_ids[index] not in self._holes]
                batch = self.work.plan.select(indices)  # noqa: PLW2901
            if not indices:
                continue
            with self._channel.budget.taken(self.work.num_addrs(indices), self._channel.is_stopped) as is_taken:
                if not is_taken or self._channel.is_stopped():
                    return SkipReason.CLOSED
                codes, error = self._channel.put(batch)
            self._error = self._error or error
            if self._note(indices, codes) is ResultClass.PRESSURE:
                self._backoff.pause()
                self._channel.recorder.add(Count.SAVES_PAUSED)
                return SkipReason.PRESSURE
        return None

    def _note(self, indices: Sequence[int], codes: Sequence[int]) -> ResultClass:
        """Counts the answers of a batch; returns the worst that they mean: pressure, or fault, or nothing."""
        saved = [index for index, code in zip(indices, codes, strict=True) if code >= 0]
        failed = [(index, code) for index, code in zip(indices, codes, strict=True) if code < 0]
        num_bytes = self.work.num_bytes(saved)
        self._num_saved += len(saved)
        self._num_bytes += num_bytes
        if self._saved is not None:
            self._saved += saved
        self._channel.recorder.add(Count.SAVED_KEYS, len(saved))
        self._channel.recorder.add(Count.SAVED_BYTES, num_bytes)
        if not failed:
            self._backoff.succeed()
            return ResultClass.OK
        self._note_failures(failed)
        classes = {classify(code) for _, code in failed}
        return ResultClass.PRESSURE if ResultClass.PRESSURE in classes else ResultClass.FAULT

    def _note_failures(self, failed: Sequence[tuple[int, int]]) -> None:
        for index, code in failed:
            group_id, chunk_id = self.work.chunk(index)
            self._failed.append(FailedChunk(group_id, chunk_id, code))
            self._holes.add(group_id)
        self._channel.recorder.add_codes(code for _, code in failed)

    def _before_holes(self, indices: Sequence[int], failed: set[int]) -> list[int]:
        """Leaves out, in each group, everything from the first failed chunk on; after that there are no holes left."""
        holes: set[int] = set()
        kept = []
        for index in indices:
            if index in failed:
                holes.add(self.work.group_ids[index])
            elif self.work.group_ids[index] not in holes:
                kept.append(index)
        self._holes.clear()
        return kept


class LoadWorker:
    """Loads requests: what each group needs at the end of the prefix, up to the first failure."""

    def __init__(self, channel: Channel) -> None:
        """Makes a worker."""
        self._channel = channel

    def load(self, request: Request) -> LoadResult:
        """Does one job.

        Raises:
            MooncrateError: The request contradicts itself or the registered memory.
            IndexError: A block table is too short.
            Exception: What an event raises.
        """
        channel = self._channel
        channel.recorder.add(Count.LOADS)
        needs = [needed_tokens(group.group, request) for group in channel.groups]
        num_tokens = request.num_tokens

        starts = iter(needs)

        def plan_of(group: RegisteredGroup, block_ids: tuple[int, ...]) -> _core.TransferPlan:
            return group.database.plan(
                num_tokens,
                request.block_hashes,
                block_ids,
                mask_num=next(starts),
                null_block_id=channel.null_block_id,
            )

        load = _Load(channel.plan(request, plan_of), request, needs)
        if len(load.work.plan):
            for event in request.events:
                event.synchronize()
            load.get()
        result = load.result()
        if not result.is_complete:
            channel.recorder.add(Count.LOADS_FAILED)
        return result


class _Load:
    """The state of one load."""

    def __init__(self, work: Work, request: Request, needs: Sequence[int]) -> None:
        self.work: Final = work
        self._channel = work.channel
        self._request = request
        self._needs = needs
        self._is_loaded = bytearray(len(work.plan))
        self._num_bytes = 0
        self._codes: Counter[int] = Counter()
        self._error: Exception | None = None

    def get(self) -> None:
        """Gets chunks in batches, up to the first that is not whole."""
        position = 0
        for batch in self._channel.batches(self.work.plan):
            indices = range(position, position + len(batch))
            position += len(batch)
            with self._channel.budget.taken(self.work.num_addrs(indices), self._channel.is_stopped) as is_taken:
                if not is_taken or self._channel.is_stopped():
                    return
                answers, self._error = self._channel.get(batch)
            if not self._note(indices, answers):
                return

    def _note(self, indices: Sequence[int], answers: Sequence[int]) -> bool:
        """Counts the answers of a batch; returns whether all chunks are whole."""
        groups, group_ids = self._channel.groups, self.work.group_ids
        loaded, bad = [], []
        for index, answer in zip(indices, answers, strict=True):
            if answer == groups[group_ids[index]].row_bytes:
                self._is_loaded[index] = 1
                loaded.append(index)
            else:
                bad.append(answer)
        num_bytes = self.work.num_bytes(loaded)
        self._num_bytes += num_bytes
        self._codes.update(bad)
        self._channel.recorder.add(Count.LOADED_KEYS, len(loaded))
        self._channel.recorder.add(Count.LOADED_BYTES, num_bytes)
        self._channel.recorder.add_codes(bad)
        return not bad

    def result(self) -> LoadResult:
        """Sums up."""
        failed: list[set[int]] = [set() for _ in self._channel.groups]
        if not all(self._is_loaded):
            for block_id, group_id, is_loaded in zip(
                self.work.plan.block_ids, self.work.group_ids, self._is_loaded, strict=True
            ):
                if not is_loaded:
                    failed[group_id].add(block_id)
        is_whole = all(self._is_loaded) and not self.work.num_null_blocks
        return LoadResult(
            num_tokens=max(self._request.num_tokens, self._request.num_cached_tokens)
            if is_whole
            else self._usable_tokens(),
            num_bytes=self._num_bytes,
            failed_block_ids=tuple(map(frozenset, failed)),
            codes=dict(self._codes),
            num_null_blocks=self.work.num_null_blocks,
            error=self._error,
        )

    def _usable_tokens(self) -> int:
        """Returns the longest prefix that is good in every group, down to what the engine held before."""
        num_cached, limit = self._request.num_cached_tokens, self._request.num_tokens
        has = [_held_chunks(group.group, num_cached) for group in self._channel.groups]
        is_cached_whole = True
        for index, is_loaded in enumerate(self._is_loaded):
            group_id, chunk_id = self.work.chunk(index)
            if is_loaded:
                has[group_id].add(chunk_id)
            else:  # a block of which the engine held a part may have been overwritten
                has[group_id].discard(chunk_id)
                is_cached_whole &= self.work.plan.chunks[index][0] >= num_cached
        for group, start, chunks in zip(self._channel.groups, self._needs, has, strict=True):
            if group.group.kind is GroupKind.FULL_ATTENTION:
                size = group.group.block_size
                first = next(chunk for chunk in itertools.count(start // size) if chunk not in chunks)
                limit = min(limit, first * size)
        unit = self._channel.unit
        for num_tokens in range(limit // unit * unit, num_cached if is_cached_whole else 0, -unit):
            if all(
                _is_good(group.group, num_tokens, chunks)
                for group, chunks in zip(self._channel.groups, has, strict=True)
            ):
                return num_tokens
        return num_cached if is_cached_whole else 0


def needed_tokens(group: CacheGroup, request: Request) -> int:
    """Returns from which token on a group's chunks are needed to have a request's prefix: the start of a chunk.

    A chunk of which the engine holds a part only is loaded again whole.
    """
    num_tokens, size = request.num_tokens, group.block_size
    start = request.num_cached_tokens // size * size
    if request.num_cached_tokens >= num_tokens:
        return -(-num_tokens // size) * size
    return max(start, tail_start(group, num_tokens))


def tail_start(group: CacheGroup, num_tokens: int) -> int:
    """Returns the start of the first chunk that a group needs for the tokens after a prefix.

    >>> from mooncrate.groups import CacheGroup
    >>> groups = CacheGroup.full_attention(16), CacheGroup.sliding_window(16, 33), CacheGroup.recurrent(16)
    >>> [tail_start(group, 160) for group in groups]
    [0, 128, 144]
    """
    size = group.block_size
    if group.kind is GroupKind.FULL_ATTENTION:
        return 0
    if group.kind is GroupKind.RECURRENT:
        return (-(-num_tokens // size) - 1) * size
    window = group.window or 1
    if window == 1:  # a token that attends to itself alone needs nothing before it
        return -(-num_tokens // size) * size
    return max(0, num_tokens - (window - 1)) // size * size


def _held_chunks(group: CacheGroup, num_cached: int) -> set[int]:
    """Returns the whole chunks that an engine with so many tokens holds: of a tail no more than it needs itself."""
    return set(range(tail_start(group, num_cached) // group.block_size, num_cached // group.block_size))


def _is_good(group: CacheGroup, num_tokens: int, chunks: set[int]) -> bool:
    """Tells whether a group that needs the end of a prefix has it there."""
    if group.kind is GroupKind.FULL_ATTENTION:
        return True  # by the limit
    size = group.block_size
    return all(chunk in chunks for chunk in range(tail_start(group, num_tokens) // size, -(-num_tokens // size)))
