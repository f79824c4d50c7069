"""Lookups in the store, each with a deadline that holds whatever the store does.

Rationale: a call into the store cannot be interrupted. So the answer and the call are kept apart: `Flight` is one
series of calls, `Lookups` waits for it on behalf of everybody who asked the same. When time is up they are told 0, and
a thread that still hangs in the store is left to itself: another one takes its place, up to a bound.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

from mooncrate.errors import StoreError
from mooncrate.jobs import seconds_until, settle
from mooncrate.metrics import Count, Recorder, Timing
from mooncrate.store import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from mooncrate import LookupPlan

logger = logging.getLogger(__name__)


class Flight:
    """One lookup in the store, and everybody who waits for its answer."""

    def __init__(self, key: Hashable, plan: LookupPlan) -> None:
        """Makes a flight that nobody waits for yet."""
        self.key: Final = key
        self.plan: LookupPlan | None = plan
        """What to ask; let go of when the flight has ended, long before its deadlines pass."""
        self.waiters: list[Future[int]] = []
        self.is_overdue = False
        """Whether somebody was told 0 already; then nobody joins, since the store seems to hang."""
        self.is_running = False


class Lookups:
    """Threads that ask the store how long a prefix is. Safe to use from many threads."""

    def __init__(
        self,
        exists: Callable[[list[str]], Sequence[int]],
        recorder: Recorder,
        num_threads: int,
        max_stuck: int,
        max_keys: int,
    ) -> None:
        """Makes lookups; threads start with the first one.

        Args:
            exists: Asks the store; any exception is a failed lookup.
            recorder: Gets counts and timings.
            num_threads: Calls to the store at once, beside those that hang.
            max_stuck: Threads that may hang. With more, lookups are 0 until one comes back.
            max_keys: Keys in one call.
        """
        self._exists = exists
        self._recorder = recorder
        self._num_threads = num_threads
        self._max_stuck = max_stuck
        self._max_keys = max_keys
        self._changed = threading.Condition()
        self._queue: deque[Flight] = deque()
        self._flights: dict[Hashable, Flight] = {}
        self._deadlines: list[tuple[float, int, Flight, Future[int]]] = []  # a heap
        self._order = itertools.count()
        self._unanswered: set[Future[int]] = set()
        self._workers: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_stuck = 0
        self._watch: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_queued(self) -> int:
        """Lookups that wait for a thread."""
        return len(self._queue)

    def ask(self, key: Hashable, plan: LookupPlan, timeout: float) -> Future[int]:
        """Asks the store, or joins an equal lookup that is on its way.

        Args:
            key: Equal for lookups that have the same answer.
            plan: What to ask.
            timeout: Seconds until the answer is 0.

        Returns:
            A future that ends with a number, within the timeout, and never with an exception.

        Raises:
            StoreError: The lookups are closed.
        """
        future: Future[int] = Future()
        self._recorder.add(Count.LOOKUPS)
        with self._changed:
            if self._is_closed:
                raise StoreError("lookup was called after close(): open a new pool")
            self._unanswered.add(future)
            if self._num_stuck == self._num_threads + self._max_stuck:
                self._fail([future], Count.LOOKUPS_FAILED)
                return future
            flight = self._flights.get(key)
            if flight is not None:
                self._recorder.add(Count.LOOKUPS_SHARED)
            else:
                flight = self._flights[key] = Flight(key, plan)
                self._queue.append(flight)
                self._hire()
            flight.waiters.append(future)
            heapq.heappush(self._deadlines, (time.monotonic() + timeout, next(self._order), flight, future))
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_loop, name="mooncrate-lookup-watch", daemon=True)
                self._watch.start()
            self._changed.notify_all()
        return future

    def close(self, deadline: float) -> None:
        """Tells 0 to everybody who waits, and refuses new lookups. Waits for threads that do not hang. Idempotent.

        Args:
            deadline: A time of `time.monotonic` until which to wait.
        """
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            waiters = [waiter for _, _, _, waiter in self._deadlines]
            self._deadlines.clear()
            self._flights.clear()
            self._changed.notify_all()
        self._fail(waiters, Count.LOOKUPS_FAILED)
        with self._changed:
            own = {threading.current_thread()}  # of a callback
            self._changed.wait_for(lambda: self._workers <= own, seconds_until(deadline))

    def _hire(self) -> None:
        """Starts a thread if one is needed and may be."""
        num_workers = len(self._workers)
        is_needed = self._num_idle < len(self._queue) and num_workers - self._num_stuck < self._num_threads
        if is_needed and num_workers < self._num_threads + self._max_stuck:
            thread = threading.Thread(target=self._loop, name="mooncrate-lookup", daemon=True)
            thread.start()
            self._workers.add(thread)

    def _loop(self) -> None:
        """Runs flights; the only place that catches what they raise."""
        while (flight := self._take()) is not None:
            num_tokens, failure = 0, None
            try:
                with self._recorder.timed(Timing.LOOKUP):
                    num_tokens = self._fly(flight)
            except BaseException:  # a panic in the store must not take the thread, and everybody who waits, with it
                failure = Count.LOOKUPS_FAILED
                logger.warning("a lookup failed and counts as 0 tokens", exc_info=True)
            waiters, is_spare = self._land(flight)
            if failure is not None:
                self._fail(waiters, failure)
            else:
                self._tell(waiters, num_tokens)
            flight = None
            if is_spare:
                return

    def _take(self) -> Flight | None:
        with self._changed:
            self._num_idle += 1
            try:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    self._leave()
                    return None
                flight = self._queue.popleft()
                flight.is_running = True
                return flight
            finally:
                self._num_idle -= 1

    def _fly(self, flight: Flight) -> int:
        """Asks window after window, until the answer is there or nobody wants it any more."""
        plan = flight.plan
        while plan is not None and (keys := plan.next_keys()):
            answers: list[int] = []
            for start in range(0, len(keys), self._max_keys):
                if not flight.waiters:
                    return 0
                part = keys[start : start + self._max_keys]
                with self._recorder.timed(Timing.EXISTS):
                    found = self._exists(part)
                self._recorder.add(Count.LOOKUP_KEYS, len(part))
                if num_failed := sum(answer < 0 for answer in found):
                    self._recorder.add(Count.FAULT_KEYS, num_failed)
                    if num_failed == len(found):
                        raise StoreError(f"batch_is_exist answered {describe(found[0])} for {len(part)} keys")
                answers += [*found[: len(part)], *[0] * (len(part) - len(found))]
            plan.feed(answers)
        return 0 if plan is None else plan.num_hit_tokens

    def _land(self, flight: Flight) -> tuple[list[Future[int]], bool]:
        """Ends a flight; returns who waits, and whether its thread has been replaced meanwhile."""
        with self._changed:
            waiters, flight.waiters = flight.waiters, []
            flight.is_running = False
            flight.plan = None
            self._forget(flight)
            if flight.is_overdue:
                self._num_stuck -= 1
            is_spare = len(self._workers) - self._num_stuck > self._num_threads or self._is_closed
            if is_spare:
                self._leave()
            self._changed.notify_all()
            return waiters, is_spare

    def _leave(self) -> None:
        self._workers.discard(threading.current_thread())
        self._changed.notify_all()

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def _watch_loop(self) -> None:
        """Tells 0 to everybody whose time is up."""
        while True:
            with self._changed:
                while not self._is_closed and (wait := self._seconds_to_deadline()) != 0.0:
                    self._changed.wait(wait)
                if self._is_closed:
                    return
                late = self._pop_late()
            for waiter in late:
                self._fail_apart(waiter)

    def _seconds_to_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][3].done():
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return seconds_until(self._deadlines[0][0])

    def _pop_late(self) -> list[Future[int]]:
        late = []
        while self._seconds_to_deadline() == 0.0:
            _, _, flight, waiter = heapq.heappop(self._deadlines)
            late.append(waiter)
            if waiter in flight.waiters:
                flight.waiters.remove(waiter)
            self._forget(flight)
            if flight.is_running and not flight.is_overdue:
                flight.is_overdue = True
                self._num_stuck += 1
                self._hire()
            elif not flight.is_running and not flight.waiters and flight in self._queue:
                self._queue.remove(flight)
        return late

    def _fail_apart(self, waiter: Future[int]) -> None:
        """Tells 0 in a thread of its own: a callback that takes its time must not make others wait past theirs."""
        tell = partial(self._fail, [waiter], Count.LOOKUPS_LATE)
        try:
            threading.Thread(target=tell, name="mooncrate-lookup-late", daemon=True).start()
        except RuntimeError:  # no more threads
            tell()

    def _tell(self, waiters: Sequence[Future[int]], num_tokens: int) -> None:
        self._settle(waiters, num_tokens, Count.HIT_TOKENS, num_tokens)

    def _fail(self, waiters: Sequence[Future[int]], count: Count) -> None:
        self._settle(waiters, 0, count, 1)

    def _settle(self, waiters: Sequence[Future[int]], num_tokens: int, count: Count, number: int) -> None:
        for waiter in waiters:
            with self._changed:
                if waiter not in self._unanswered:
                    continue
                self._unanswered.remove(waiter)
            if not waiter.cancelled():
                self._recorder.add(count, number)  # first: whoever waits may look at the counts at once
            settle(waiter, num_tokens)
