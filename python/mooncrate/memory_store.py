"""A real store over the memory of this process, which can be told to fail: for tests, ours and those of users.

It reads and writes registered memory by address, as Mooncake does, and answers as Mooncake was measured to answer; one
contract suite runs on both. `mooncrate.store_faults` has what can go wrong, with examples.
"""

import bisect
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from mooncrate.errors import StoreError
from mooncrate.memory_pool import MemoryPool
from mooncrate.store import ResultCode
from mooncrate.store_faults import CallName, Faults

ADDRESS_SPACE: Final = 1 << 64
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Addresses and sizes of the parts of one object."""


@dataclass(frozen=True)
class Call:
    """One call that a `MemoryStore` has answered."""

    name: CallName
    keys: tuple[str, ...]
    answers: tuple[int, ...]


class MemoryReplica:
    """Where an object lies: in memory."""

    def __init__(self, size: int) -> None:
        """Describes an object of ``size`` bytes."""
        self.size: Final = size

    def is_memory_replica(self) -> bool:
        """Returns True."""
        return True

    def is_disk_replica(self) -> bool:
        """Returns False."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Returns False."""
        return False


class MemoryStore:
    """A client of a `MemoryPool`. Satisfies `mooncrate.store.Store`; safe to use from many threads.

    Two clients of one pool exchange objects:

    >>> import numpy as np
    >>> pool = MemoryPool(1 << 20)
    >>> saver, loader = MemoryStore(pool), MemoryStore(pool)
    >>> saved, loaded = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    >>> saver.register_buffer(saved.ctypes.data, 8), loader.register_buffer(loaded.ctypes.data, 8)
    (0, 0)
    >>> saver.batch_put_from_multi_buffers(["key"], [(saved.ctypes.data,)], [(8,)])
    [0]
    >>> loader.batch_get_into_multi_buffers(["key", "none"], [(loaded.ctypes.data,)] * 2, [(8,)] * 2)
    [8, -704]
    >>> loaded.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]

    After `close` every call is a `mooncrate.errors.StoreError`, where Mooncake would end the process.

    Limitations: addresses of the CPU only. An address that was registered and then freed is read and written all the
    same, with the consequences that this has in C.
    """

    def __init__(
        self,
        pool: MemoryPool | None = None,
        *,
        segment_bytes: int = 0,
        require_registered: bool = True,
        log: list[Call] | None = None,
    ) -> None:
        """Makes a client that is set up.

        Args:
            pool: What it shares with other clients; one of its own if not given.
            segment_bytes: Room that it adds to the pool, until it closes.
            require_registered: Whether memory that no registered range contains is refused with -800 (the transfer
                fails), before a byte of it is touched. That is what happens over RDMA. Over TCP on one host
                Mooncake lets it pass, and so does this with False.
            log: Gets every call that was answered, in order; otherwise calls are not kept.
        """
        self.pool: Final = pool if pool is not None else MemoryPool()
        self.faults: Final = Faults()
        self._segment = self.pool.add_segment(segment_bytes)
        self._require_registered = require_registered
        self._log = log
        self._lock = threading.Lock()
        self._starts: list[int] = []  # of registered ranges, ascending; no two overlap
        self._ends: list[int] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        """Returns the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the store."""
        self.close()

    def die(self) -> None:
        """Ends this client as a crash of its process would: see `mooncrate.memory_pool.MemoryPool.lose_segment`."""
        with self._lock:
            self._is_closed = True
        self.pool.lose_segment(self._segment)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Returns 1 or 0 per key, -900 without a master, and takes a lease on every object found."""
        self._check_open("batch_is_exist")
        answers = self.faults.run_batch("exists", keys, lambda indices: self.pool.exists([keys[i] for i in indices]))
        return self._logged("exists", keys, answers)

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object = None,
    ) -> list[int]:
        """Stores one object per key; ``config`` changes nothing here.

        Returns:
            Per key 0, also where the key is there already; -200 without room; -600 for an empty key, an empty row or
            no bytes, and for all keys when the numbers of keys, rows, or addresses and sizes in a row differ; -800
            for memory that is not registered; -900 without a master.

        Raises:
            TypeError: Something else than whole numbers from 0 to 2^64 - 1 in a row.
        """
        del config
        self._check_open("batch_put_from_multi_buffers")
        rows = _rows(all_buffer_ptrs, all_sizes)
        is_even = len(keys) == len(rows) and all(len(addrs) == len(sizes) for addrs, sizes in rows)

        def work(indices: Sequence[int]) -> list[int]:
            return [self._put(keys[i], *rows[i]) if is_even else ResultCode.INVALID_PARAMS.value for i in indices]

        return self._logged("put", keys, self.faults.run_batch("put", keys, work))

    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Reads one object per key.

        Returns:
            Per key the bytes; -704 when it is absent; -600 when there is room for less, in an empty row, and for all
            keys when the numbers of keys and rows differ; -800 when there is room for more, and for memory that is
            not registered; -900 without a master. A row with different numbers of addresses and sizes is -600, where
            Mooncake reads what lies behind the shorter list.

        Raises:
            TypeError: Something else than whole numbers from 0 to 2^64 - 1 in a row.
        """
        self._check_open("batch_get_into_multi_buffers")
        rows = _rows(all_buffer_ptrs, all_sizes)

        def work(indices: Sequence[int]) -> list[int]:
            if len(rows) != len(keys):
                return [ResultCode.INVALID_PARAMS.value] * len(indices)
            return [self._get(keys[i], *rows[i]) for i in indices]

        return self._logged("get", keys, self.faults.run_batch("get", keys, work))

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Returns 0, or -600 for an empty range or one that shares a byte with a registered one."""
        self._check_open("register_buffer")
        start, size = _unsigned(buffer_ptr), _unsigned(size)

        def work() -> int:
            with self._lock:
                index = bisect.bisect_right(self._starts, start)
                is_free = (index == 0 or self._ends[index - 1] <= start) and (
                    index == len(self._starts) or start + size <= self._starts[index]
                )
                if size == 0 or start + size > ADDRESS_SPACE or not is_free:
                    return ResultCode.INVALID_PARAMS.value
                self._starts.insert(index, start)
                self._ends.insert(index, start + size)
                return ResultCode.OK.value

        return self._logged_one("register", self.faults.run("register", work))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Returns 0, or -600 where no registered range starts."""
        self._check_open("unregister_buffer")
        start = _unsigned(buffer_ptr)

        def work() -> int:
            with self._lock:
                if start not in self._starts:
                    return ResultCode.INVALID_PARAMS.value
                index = self._starts.index(start)
                del self._starts[index], self._ends[index]
                return ResultCode.OK.value

        return self._logged_one("unregister", self.faults.run("unregister", work))

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes every key in which the pattern is found; returns their number, -600 for no pattern, or -900."""
        self._check_open("remove_by_regex")
        answer = self.faults.run("remove", lambda: self.pool.remove_by_regex(regex_pattern, force))
        return self._logged_one("remove", answer)

    def remove_all(self, force: bool = False) -> int:
        """Removes every key; returns their number, or -900."""
        self._check_open("remove_all")
        return self._logged_one("remove", self.faults.run("remove", lambda: self.pool.remove_all(force)))

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[MemoryReplica]]:
        """Returns one replica for each key that is there; nothing when a fault gives a code."""
        self._check_open("batch_get_replica_desc")
        sizes: dict[str, int] = {}

        def work() -> int:
            sizes.update(self.pool.sizes_of(keys))
            return ResultCode.OK.value

        answer = self._logged_one("describe", self.faults.run("describe", work))
        return {key: [MemoryReplica(size)] for key, size in sizes.items()} if answer == 0 else {}

    def health_check(self) -> int:
        """Returns 0, also without a master."""
        self._check_open("health_check")
        return self._logged_one("health", self.faults.run("health", lambda: ResultCode.OK.value))

    def close(self) -> int:
        """Takes the room of this client out of the pool, with the objects in it; returns 0. Idempotent."""

        def work() -> int:
            with self._lock:
                was_closed, self._is_closed = self._is_closed, True
            if not was_closed:
                self.pool.remove_segment(self._segment)
            return ResultCode.OK.value

        return self._logged_one("close", self.faults.run("close", work))

    def _put(self, key: str, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        if not sizes or not key:
            return ResultCode.INVALID_PARAMS.value
        if not self._is_reachable(addrs, sizes):
            return ResultCode.TRANSFER_FAIL.value
        return self.pool.put_rows(key, addrs, sizes)

    def _get(self, key: str, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        if len(addrs) != len(sizes):
            return ResultCode.INVALID_PARAMS.value
        if not self._is_reachable(addrs, sizes):
            return ResultCode.TRANSFER_FAIL.value
        return self.pool.get_rows(key, addrs, sizes)

    def _is_reachable(self, addrs: Sequence[int], sizes: Sequence[int]) -> bool:
        """Tells whether each part lies within one registered range."""
        if not self._require_registered:
            return True
        with self._lock:
            for addr, size in zip(addrs, sizes, strict=True):
                index = bisect.bisect_right(self._starts, addr) - 1
                if index < 0 or addr + size > self._ends[index]:
                    return False
        return True

    def _check_open(self, name: str) -> None:
        with self._lock:
            if self._is_closed:
                raise StoreError(f"{name} was called after close(): Mooncake would end the process")

    def _logged(self, name: CallName, keys: Sequence[str], answers: list[int]) -> list[int]:
        if self._log is not None:
            self._log.append(Call(name, tuple(keys), tuple(answers)))
        return answers

    def _logged_one(self, name: CallName, answer: int) -> int:
        self._logged(name, (), [answer])
        return answer


def _rows(all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]) -> list[Row]:
    """Returns the rows of a call, checked and copied; none at all if there are more of one kind."""
    addrs, sizes = ([_checked(row) for row in rows] for rows in (all_buffer_ptrs, all_sizes))
    return list(zip(addrs, sizes, strict=True)) if len(addrs) == len(sizes) else []


def _checked(row: Sequence[int]) -> tuple[int, ...]:
    if isinstance(row, str | bytes):
        raise TypeError(f"{row!r} is no row of numbers")
    numbers = tuple(row)
    if set(map(type, numbers)) <= {int} and (not numbers or (min(numbers) >= 0 and max(numbers) < ADDRESS_SPACE)):
        return numbers  # half a million numbers in a large call: one by one, in Python, this would be what takes time
    return tuple(map(_unsigned, numbers))


def _unsigned(number: int) -> int:
    number = operator.index(number)
    if not 0 <= number < ADDRESS_SPACE:
        raise TypeError(f"{number} does not fit an unsigned 64-bit number")
    return number
