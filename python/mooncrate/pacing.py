"""How much goes to the store at once, and when: bounds, the budget of addresses in flight, the pause after pressure."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from mooncrate.errors import LayoutError
from mooncrate.groups import check_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class PoolLimits:
    """Bounds of a `mooncrate.pool.KVPool`. The defaults suit; tests and unusual machines change them.

    Attributes:
        max_batch_integers: Addresses and sizes in one call. The store converts them with the GIL held, 44 nanoseconds
            each: the default keeps other Python threads waiting for 6 ms.
        max_batch_bytes: Bytes in one call, so that a close waits for no more than them.
        max_keys_per_exists: Keys in one existence check.
        max_addrs_in_flight: Addresses in flight over all threads; None for what the store's transport takes.
        num_save_threads: Threads that save.
        num_load_threads: Threads that load.
        num_lookup_threads: Lookups that can be in the store at once.
        max_stuck_lookups: Threads that may hang in the store beside those; with more, lookups are 0 without asking.
        max_queued_saves: Saves that wait; more are refused.
        max_queued_loads: Loads that wait; more make `load` wait.
        first_pause_seconds: Pause of saving after the pool had no room; doubles while it stays so.
        max_pause_seconds: Longest pause.
    """

    max_batch_integers: int = 131_072
    max_batch_bytes: int = 128 << 20
    max_keys_per_exists: int = 16_384
    max_addrs_in_flight: int | None = None
    num_save_threads: int = 1
    num_load_threads: int = 2
    num_lookup_threads: int = 4
    max_stuck_lookups: int = 16
    max_queued_saves: int = 256
    max_queued_loads: int = 256
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            LayoutError: A count below 1 (2 integers make the smallest batch), or a pause that cannot be.
        """
        for name in (one.name for one in fields(self) if one.type == "int"):
            least = {"max_batch_integers": 2, "max_stuck_lookups": 0}.get(name, 1)
            check_integer(name, getattr(self, name), least=least)
        if self.max_addrs_in_flight is not None:
            check_integer("max_addrs_in_flight", self.max_addrs_in_flight, least=1)
        if not 0 <= self.first_pause_seconds <= self.max_pause_seconds < float("inf"):
            raise LayoutError(
                f"first_pause_seconds {self.first_pause_seconds} and max_pause_seconds {self.max_pause_seconds} are "
                "not 0 <= first <= longest"
            )


class AddressBudget:
    """Addresses that may be in flight over all threads, first come, first served.

    Over TCP a peer's queue is shared by all threads of the process, and an address too many fails a whole batch after
    a minute. Which peer an object is read from is the store's secret, so one budget covers all peers.
    """

    _shared: ClassVar[WeakKeyDictionary[object, dict[int, AddressBudget]]] = WeakKeyDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, owner: object, limit: int | None) -> AddressBudget:
        """Returns the budget that all share who send through the same queues.

        Args:
            owner: Whose queues they are. One that cannot be hashed or referred to weakly shares with nobody.
            limit: Addresses that they take; None is no limit.
        """
        if limit is None:
            return cls(limit)
        with cls._sharing:
            try:
                budgets = cls._shared.setdefault(owner, {})
            except TypeError:  # not weakly referable, or not hashable
                return cls(limit)
            return budgets.setdefault(limit, cls(limit))

    def __init__(self, limit: int | None) -> None:
        """Makes a budget; None is no limit."""
        self._limit = limit
        self._changed = threading.Condition()
        self._in_flight = 0
        self._most_in_flight = 0
        self._waiting: deque[object] = deque()

    @property
    def limit(self) -> int | None:
        """Addresses in flight at most."""
        return self._limit

    @property
    def most_in_flight(self) -> int:
        """Most addresses that ever were in flight at once."""
        with self._changed:
            return self._most_in_flight

    @contextmanager
    def taken(self, num_addrs: int, is_stopped: Callable[[], bool]) -> Iterator[bool]:
        """Waits for room for so many addresses, and holds it for the time of a ``with``.

        Yields:
            Whether there is room; False once ``is_stopped`` says so, which `wake` makes it look at.
        """
        is_taken = self._take(num_addrs, is_stopped)
        try:
            yield is_taken
        finally:
            if is_taken:
                with self._changed:
                    self._in_flight -= num_addrs
                    self._changed.notify_all()

    def wake(self) -> None:
        """Makes all who wait ask ``is_stopped`` again."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, num_addrs: int, is_stopped: Callable[[], bool]) -> bool:
        if self._limit is not None and num_addrs > self._limit:
            raise LayoutError(f"{num_addrs} addresses in one batch, but the transport takes {self._limit}")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while not (self._waiting[0] is ticket and self._has_room(num_addrs)):
                    if is_stopped():
                        return False
                    self._changed.wait()
                self._in_flight += num_addrs
                self._most_in_flight = max(self._most_in_flight, self._in_flight)
                return True
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _has_room(self, num_addrs: int) -> bool:
        return self._limit is None or self._in_flight + num_addrs <= self._limit


class Backoff:
    """The pause of saving after the pool had no room. Safe to use from many threads.

    Each pause that brings no success is twice as long as the one before, up to the longest, and shortened by chance to
    between half and all of that, so that ranks which ran into the wall together do not come back together.
    """

    def __init__(
        self,
        first_seconds: float,
        max_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Begins without a pause.

        Args:
            first_seconds: First pause.
            max_seconds: Longest pause.
            clock: Seconds that never go back.
            draw: Gives numbers in ``[0, 1)``.
        """
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._next_seconds = first_seconds
        self._paused_until: float | None = None

    def is_paused(self) -> bool:
        """Tells whether saving rests."""
        with self._lock:
            return self._paused_until is not None and self._clock() < self._paused_until

    def pause(self) -> None:
        """Begins a pause. During one it changes nothing: threads that fail together count once."""
        with self._lock:
            now = self._clock()
            if self._paused_until is not None and now < self._paused_until:
                return
            self._paused_until = now + self._next_seconds * (1 + self._draw()) / 2
            self._next_seconds = min(self._next_seconds * 2, self._max_seconds)

    def succeed(self) -> None:
        """Ends the pause, and makes the next one short again."""
        with self._lock:
            self._paused_until = None
            self._next_seconds = self._first_seconds
