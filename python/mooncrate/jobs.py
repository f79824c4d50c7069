"""Jobs, and the threads that work on them: bounded queues, one place for exceptions, and an end for every job.

A job is a future and the work behind it. It is known by itself, never by the name of the request that it is for: a
request that was preempted and resumed has several. Whoever ends a job first decides how; nobody does it twice.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from mooncrate.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_job_ids: Final = itertools.count(1)


def settle(future: Future[Result], result: Result | None = None, error: BaseException | None = None) -> bool:
    """Ends a future unless it has ended; returns whether this did it.

    Nothing that its callbacks raise comes through: whoever ends a future has others to end.
    """
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]
    except InvalidStateError:
        return False
    except BaseException:  # SystemExit and its like; a future deals with the others itself
        logger.exception("a callback of a future failed")
    return True


def seconds_until(deadline: float) -> float:
    """Returns how long to wait for a time of `time.monotonic`, infinity too, in what threads can wait for."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


class Job(Generic[Result]):
    """Something to do once.

    Attributes:
        job_id: Its number, unique in this process.
        name: For messages.
        work: What to do, in a worker's thread.
        future: Ends when the job does.
    """

    def __init__(self, name: str, work: Callable[[], Result]) -> None:
        """Describes a job."""
        self.job_id: Final = next(_job_ids)
        self.name: Final = name
        self.work: Final = work
        self.future: Final[Future[Result]] = Future()


class Workers(Generic[Result]):
    """Threads that run jobs of one kind in the order in which they came, from a queue that does not grow.

    Whatever a job or a callback raises, ``SystemExit`` too, ends that job alone, and the thread goes on. A thread that
    is gone all the same ends the jobs that wait, and shows at the next `offer` or `put`.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_queued: int,
        on_end: Callable[[Future[Result], BaseException | None], None] = lambda *_: None,
    ) -> None:
        """Makes workers; threads start with the first job.

        Args:
            name: Of the threads, and for messages.
            num_threads: Threads.
            max_queued: Jobs that wait at most, beside those that run.
            on_end: Is called for every job that ends, with its error if it has one, in the thread that ends it, before
                anybody who waits for it goes on.
        """
        self.name: Final = name
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._on_end = on_end
        self._changed = threading.Condition()
        self._queue: deque[Job[Result]] = deque()
        self._unfinished: dict[int, Job[Result]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._cause_of_death: BaseException | None = None

    @property
    def num_queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    @property
    def num_unfinished(self) -> int:
        """Jobs that wait or run."""
        return len(self._unfinished)

    def offer(self, job: Job[Result]) -> bool:
        """Queues a job if there is room; returns whether there was.

        Raises:
            StoreError: The workers are closed, or a thread is dead.
        """
        with self._changed:
            self._check()
            if len(self._queue) >= self._max_queued:
                return False
            self._append(job)
            return True

    def put(self, job: Job[Result]) -> None:
        """Queues a job, and waits until there is room for it.

        Raises:
            StoreError: The workers are closed, now or while this waits, or a thread is dead.
        """
        with self._changed:
            while True:
                self._check()
                if len(self._queue) < self._max_queued:
                    return self._append(job)
                self._changed.wait()

    @contextmanager
    def held(self) -> Iterator[int]:
        """Keeps jobs from being queued, from beginning and from ending for the time of a ``with``.

        Yields:
            How many wait or run.
        """
        with self._changed:
            yield len(self._unfinished)

    def has_thread(self, thread: threading.Thread) -> bool:
        """Tells whether a thread is one of these."""
        return thread in self._threads

    def close(self) -> None:
        """Refuses new jobs; those that are there go on, and threads end after the last. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """Waits, after `close`, until all threads have ended, or until a time of `time.monotonic`.

        Returns:
            Whether they have. Called from one of the threads, that one does not count.
        """
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds_until(deadline))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def abandon(self, error: BaseException) -> int:
        """Ends all jobs that have not ended, those that hang in a thread too; returns how many."""
        with self._changed:
            self._queue.clear()
            jobs = list(self._unfinished.values())
            self._changed.notify_all()
        return sum([self._end(job, error=error) for job in jobs])

    def _append(self, job: Job[Result]) -> None:
        if len(self._threads) < self._num_threads and len(self._unfinished) >= len(self._threads):
            name = f"mooncrate-{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            thread.start()  # first: where it fails, there is no job that nobody would end
            self._threads.append(thread)
        self._queue.append(job)
        self._unfinished[job.job_id] = job
        self._changed.notify_all()

    def _check(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self.name} was called after close(): open a new pool")
        if self._cause_of_death is not None:
            raise StoreError(
                f"a {self.name} thread ended with {self._cause_of_death!r}: close this pool and open a new one"
            ) from self._cause_of_death

    def _take(self) -> tuple[Job[Result], bool] | None:
        """Returns a job that begins now, and whether anybody still wants it; None when there will be none."""
        with self._changed:
            while not self._queue:
                if self._is_closed or self._cause_of_death is not None:
                    return None
                self._changed.wait()
            job = self._queue.popleft()
            self._changed.notify_all()
            # Under the lock: for `abandon` a job either waits in the queue or runs.
            return job, job.future.set_running_or_notify_cancel()

    def _loop(self) -> None:
        """Runs jobs."""
        try:
            while (taken := self._take()) is not None:
                self._work_on(*taken)
                del taken  # a thread that waits holds nobody's blocks
        except BaseException as error:
            logger.exception("a %s thread ended", self.name)
            self._die(error)

    def _work_on(self, job: Job[Result], is_wanted: bool) -> None:
        """Runs a job and ends it; the only place that catches what jobs raise."""
        if not is_wanted:
            self._end(job)
            return
        try:
            result = job.work()
        except BaseException as error:  # fails this job, and no other
            logger.exception("%s failed", job.name)
            if not isinstance(error, Exception) or isinstance(error, CancelledError):
                # As they are they would end the thread that waits for the job, or say that it never began.
                self._end(job, error=_caused_by(error, f"{job.name} ended with {error!r}"))
            else:
                self._end(job, error=error)
        else:
            self._end(job, result)

    def _end(self, job: Job[Result], result: Result | None = None, error: BaseException | None = None) -> bool:
        """Ends a job unless it has ended; returns whether this did it.

        It is forgotten first, so that whoever waits for its future finds it gone.
        """
        with self._changed:
            if self._unfinished.pop(job.job_id, None) is None:
                return False
            self._changed.notify_all()
        try:
            self._on_end(job.future, error)
        except BaseException:
            logger.exception("what goes before the end of %s failed", job.name)
        settle(job.future, result, error)
        return True

    def _die(self, error: BaseException) -> None:
        """Ends the jobs that wait, when a thread could not go on."""
        with self._changed:
            self._cause_of_death = error
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for job in waiting:
            self._end(job, error=_caused_by(error, f"a {self.name} thread ended with {error!r} before this was done"))


def _caused_by(cause: BaseException, message: str) -> StoreError:
    error = StoreError(message)
    error.__cause__ = cause
    return error
