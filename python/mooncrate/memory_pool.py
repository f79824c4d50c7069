"""The pool behind one or more `mooncrate.memory_store.MemoryStore`: objects, room, leases, eviction, and a master.

Rationale: tests that go through a pool of real bytes find what mocks cannot: a wrong address, a swapped block, a byte
that was not moved. What it answers was measured on Mooncake 0.3.13 over TCP, and ``tests/store_contract.py`` holds both
to it.

Limitations: one process, memory of the CPU, one replica. Eviction is due a fixed time after a put found no room, and
runs when the pool is next used, so that with a `mooncrate.store_faults.ManualClock` nothing depends on luck.
"""

import ctypes
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncrate.store import ResultCode

DEFAULT_POOL_BYTES: Final = 1 << 30
LEASE_SECONDS: Final = 10.0
"""How long an existence check or a get keeps an object from being evicted, or removed without force."""
EVICTION_SECONDS: Final = 1.0
CLIENT_TTL_SECONDS: Final = 10.0
"""How long the master takes a client that died for alive."""
EVICTED_PERCENT: Final = 5


@dataclass(eq=False)
class Segment:
    """Memory that somebody contributes to the pool. Nothing is allocated before it holds objects."""

    num_bytes: int
    used_bytes: int = 0
    died_at: float | None = None
    """When its owner died; what lies in it cannot be read, and only the master does not know."""


@dataclass(eq=False)
class _Object:
    """What lies under one key."""

    data: bytearray
    segment: Segment
    leased_until: float = 0.0
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))


class MemoryPool:
    """Objects in the memory of this process, shared by the clients that are made with it. Safe with threads.

    >>> pool = MemoryPool(1 << 20)
    >>> pool.put("key", b"bytes")
    0
    >>> pool.read("key"), pool.keys(), pool.used_bytes
    (b'bytes', ['key'], 5)
    """

    def __init__(
        self,
        num_bytes: int = DEFAULT_POOL_BYTES,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE_SECONDS,
        eviction_seconds: float = EVICTION_SECONDS,
        client_ttl_seconds: float = CLIENT_TTL_SECONDS,
    ) -> None:
        """Makes an empty pool with a master that runs.

        Args:
            num_bytes: Room that belongs to no client, and stays; clients can add theirs.
            clock: Seconds, like `time.monotonic`.
            lease_seconds: See `LEASE_SECONDS`.
            eviction_seconds: Time from a put that finds no room to the eviction that it causes.
            client_ttl_seconds: See `CLIENT_TTL_SECONDS`.
        """
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._eviction_seconds = eviction_seconds
        self._client_ttl_seconds = client_ttl_seconds
        self._lock = threading.RLock()
        self._segments = [Segment(num_bytes)]
        self._objects: dict[str, _Object] = {}  # oldest first
        self._evict_at: float | None = None
        self._wanted_bytes = 0  # by the largest object that found no room since the last eviction
        self._is_master_up = True

    # What tests look at and change.

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        with self._lock:
            return sum(segment.used_bytes for segment in self._segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.num_bytes for segment in self._segments)

    @property
    def is_master_up(self) -> bool:
        """Whether the master runs."""
        with self._lock:
            return self._is_master_up

    def keys(self) -> list[str]:
        """Returns all keys, oldest first; takes no lease."""
        with self._lock:
            self._settle()
            return list(self._objects)

    def read(self, key: str) -> bytes:
        """Returns the bytes of an object; takes no lease.

        Raises:
            KeyError: There is none.
        """
        with self._lock:
            return bytes(self._objects[key].data)

    def drop(self, keys: Iterable[str]) -> int:
        """Makes keys vanish, lease or not; returns how many were there."""
        with self._lock:
            return sum(self._delete(key) for key in list(keys))

    def evict(self, num_bytes: int | None = None) -> int:
        """Evicts objects without a lease, oldest first, until so much is free; returns how many went.

        Args:
            num_bytes: If not given, 5 percent of the pool, or what the largest object needs that found no room.
        """
        with self._lock:
            wanted = max(self.num_bytes * EVICTED_PERCENT // 100, self._wanted_bytes, 1)
            wanted = wanted if num_bytes is None else num_bytes
            num_evicted = 0
            now = self._clock()
            for key, found in list(self._objects.items()):
                if self.num_bytes - self.used_bytes >= wanted:
                    break
                if found.leased_until <= now and found.segment.died_at is None:
                    num_evicted += self._delete(key)
            if num_evicted:
                self._evict_at, self._wanted_bytes = None, 0
            return num_evicted

    def stop_master(self) -> None:
        """Stops the master: every call on the pool is answered with -900, until `start_master`."""
        with self._lock:
            self._is_master_up = False

    def start_master(self) -> None:
        """Starts the master again: clients go on without a new set-up, and the objects are gone."""
        with self._lock:
            self._is_master_up = True
            self.drop(list(self._objects))
            self._evict_at, self._wanted_bytes = None, 0

    # What clients do.

    def add_segment(self, num_bytes: int) -> Segment:
        """Adds room that belongs to a client."""
        segment = Segment(num_bytes)
        with self._lock:
            self._segments.append(segment)
        return segment

    def remove_segment(self, segment: Segment) -> None:
        """Takes a client's room out of the pool, with the objects in it, as its ``close()`` does."""
        with self._lock:
            for key, found in list(self._objects.items()):
                if found.segment is segment:
                    self._delete(key)
            if segment in self._segments:
                self._segments.remove(segment)

    def lose_segment(self, segment: Segment) -> None:
        """Loses the memory of a client that died without a word.

        Until the master notices (`CLIENT_TTL_SECONDS`), its objects seem to be there: exists says 1, a put of such a
        key says 0 and stores nothing, a get says -800.
        """
        with self._lock:
            if segment.died_at is None:
                segment.died_at = self._clock()

    def exists(self, keys: Sequence[str]) -> list[int]:
        """Returns 1 or 0 per key, or -900, and takes a lease on what it finds."""
        with self._lock:
            if not self._is_master_up:
                return [ResultCode.RPC_FAIL.value] * len(keys)
            self._settle()
            until = self._clock() + self._lease_seconds
            answers = []
            for key in keys:
                found = self._objects.get(key)
                if found is not None:
                    found.leased_until = until
                answers.append(int(found is not None))
            return answers

    def put(self, key: str, data: bytes | bytearray) -> int:
        """Stores bytes; see `put_rows`."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(copy := bytearray(data))) if data else 0
        return self.put_rows(key, [address], [len(copy)]) if data else ResultCode.INVALID_PARAMS.value

    def put_rows(self, key: str, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Stores the bytes at some addresses, one after the other; returns 0 or a negative code.

        A key that is there keeps its bytes, and the answer is 0.
        """
        num_bytes = sum(sizes)
        if not key or num_bytes == 0:
            return ResultCode.INVALID_PARAMS.value
        with self._lock:
            if not self._is_master_up:
                return ResultCode.RPC_FAIL.value
            self._settle()
            if key in self._objects:
                return ResultCode.OK.value
            segment = self._find_room(num_bytes)
            if segment is None:
                self._wanted_bytes = max(self._wanted_bytes, num_bytes if num_bytes <= self.num_bytes else 0)
                if self._evict_at is None:
                    self._evict_at = self._clock() + self._eviction_seconds
                return ResultCode.NO_AVAILABLE_HANDLE.value
            found = _Object(bytearray(num_bytes), segment)
            offset = 0
            for addr, size in zip(addrs, sizes, strict=True):
                ctypes.memmove(found.address + offset, addr, size)
                offset += size
            segment.used_bytes += num_bytes
            self._objects[key] = found
            return ResultCode.OK.value

    def get_rows(self, key: str, addrs: Sequence[int], sizes: Sequence[int]) -> int:
        """Writes an object to some addresses, one after the other; returns the bytes or a negative code.

        Nothing is written unless all of it fits exactly.
        """
        with self._lock:
            if not self._is_master_up:
                return ResultCode.RPC_FAIL.value
            self._settle()
            found = self._objects.get(key)
            if found is None:
                return ResultCode.OBJECT_NOT_FOUND.value
            num_bytes = sum(sizes)
            if not sizes or num_bytes < len(found.data):
                return ResultCode.INVALID_PARAMS.value
            found.leased_until = self._clock() + self._lease_seconds
            if num_bytes > len(found.data) or found.segment.died_at is not None:
                return ResultCode.TRANSFER_FAIL.value
            offset = 0
            for addr, size in zip(addrs, sizes, strict=True):
                ctypes.memmove(addr, found.address + offset, size)
                offset += size
            return num_bytes

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        """Removes every key in which the pattern is found, leased ones only by force; returns how many.

        The dialect is Python's, which agrees with Mooncake's (ECMAScript) on what keys need.
        """
        try:
            expression = re.compile(pattern)
        except re.error:
            return ResultCode.INVALID_PARAMS.value
        return self._remove(expression.search, force)

    def remove_all(self, force: bool) -> int:
        """Removes every key, leased ones only by force; returns how many."""
        return self._remove(lambda _key: True, force)

    def sizes_of(self, keys: Collection[str]) -> dict[str, int]:
        """Returns the bytes of those objects that are there, and takes a lease on them; nothing without a master."""
        with self._lock:
            if not self._is_master_up:
                return {}
            self._settle()
            until = self._clock() + self._lease_seconds
            found = {key: self._objects[key] for key in keys if key in self._objects}
            for one in found.values():
                one.leased_until = until
            return {key: len(one.data) for key, one in found.items()}

    def _remove(self, is_meant: Callable[[str], object], force: bool) -> int:
        with self._lock:
            if not self._is_master_up:
                return ResultCode.RPC_FAIL.value
            self._settle()
            now = self._clock()
            keys = [key for key, found in self._objects.items() if force or found.leased_until <= now]
            return sum(self._delete(key) for key in keys if is_meant(key))

    def _find_room(self, num_bytes: int) -> Segment | None:
        for segment in self._segments:
            if segment.died_at is None and segment.num_bytes - segment.used_bytes >= num_bytes:
                return segment
        return None

    def _delete(self, key: str) -> bool:
        found = self._objects.pop(key, None)
        if found is not None:
            found.segment.used_bytes -= len(found.data)
        return found is not None

    def _settle(self) -> None:
        """Does what the master would have done by now."""
        now = self._clock()
        for segment in list(self._segments):
            if segment.died_at is not None and now >= segment.died_at + self._client_ttl_seconds:
                self.remove_segment(segment)
        if self._evict_at is not None and now >= self._evict_at:
            self.evict()
