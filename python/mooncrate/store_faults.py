"""What a `MemoryStore` does wrong when a test tells it to: plain objects that say when, and then what.

>>> from mooncrate.memory_store import MemoryStore
>>> store = MemoryStore()
>>> _ = store.faults.add(Fault(call="exists", keys={"b"}, code=-1))
>>> store.batch_is_exist(["a", "b", "c"]), store.batch_is_exist(["a", "b", "c"])
([0, -1, 0], [0, 0, 0])

The third call and all later ones raise; answers that are too short; both at once:

>>> _ = store.faults.add(Fault(call="exists", skip=2, times=None, error=ConnectionError("gone")))
>>> [store.batch_is_exist(["a"]) for _ in range(2)]
[[0], [0]]
>>> store.batch_is_exist(["a"])
Traceback (most recent call last):
ConnectionError: gone
>>> store.faults.clear()
>>> with store.faults.active(Fault(truncate=2), Fault(indices={0}, code=-900)):
...     store.batch_is_exist(["a", "b", "c"])
[-900, 0]
>>> store.batch_is_exist(["a", "b", "c"])
[0, 0, 0]

What takes time is a function that runs before the call, or after it. Slow, without waiting (`ManualClock`), and hanging
until the test has seen that the call is there:

>>> from concurrent.futures import ThreadPoolExecutor
>>> from functools import partial
>>> clock = ManualClock()
>>> slow = store.faults.add(Fault(before=partial(clock.advance, 0.02), times=None))
>>> store.batch_is_exist(["a"]), clock(), store.faults.num_times(slow)
([0], 0.02, 1)
>>> gate = Gate()
>>> _ = store.faults.add(Fault(call="exists", before=gate.hold))
>>> with ThreadPoolExecutor() as executor:
...     call = executor.submit(store.batch_is_exist, ["a"])
...     gate.wait_until_reached()
...     was_done = call.done()
...     gate.open()
...     (was_done, call.result())
(False, [0])

A key that vanishes between lookup and load: ``Fault(call="exists", after=partial(store.pool.drop, ["b"]))``.
A full pool: ``Fault(call="put", code=-200, times=None)``.
A registration that fails: ``Fault(call="register", code=-600)``.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, get_args

CallName = Literal["exists", "put", "get", "register", "unregister", "remove", "describe", "health", "close"]
"""Short names of the store's calls, in the order of `mooncrate.store.Store`; ``remove`` is both removals, ``describe``
is ``batch_get_replica_desc``."""

WAIT_SECONDS: Final = 60.0
"""How long a `Gate` waits: a test that forgets one fails instead of hanging."""


class ManualClock:
    """A clock that stands still until it is told otherwise; called like `time.monotonic`. Safe with threads."""

    def __init__(self, now: float = 0.0) -> None:
        """Starts at ``now`` seconds."""
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Returns the time in seconds."""
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock on."""
        with self._lock:
            self._now += seconds


class Gate:
    """Holds calls until it is opened, and tells when one is there: ``Fault(before=gate.hold)``."""

    def __init__(self, timeout: float = WAIT_SECONDS) -> None:
        """Makes a gate that is closed.

        Args:
            timeout: Seconds after which `hold` and `wait_until_reached` raise `TimeoutError`.
        """
        self._timeout = timeout
        self._reached = threading.Semaphore(0)
        self._opened = threading.Event()

    def hold(self) -> None:
        """Waits until the gate is open."""
        self._reached.release()
        if not self._opened.wait(self._timeout):
            raise TimeoutError(f"nobody opened the gate within {self._timeout:g} s")

    def wait_until_reached(self, num_calls: int = 1) -> None:
        """Waits until so many more calls have come to the gate."""
        for _ in range(num_calls):
            if not self._reached.acquire(timeout=self._timeout):
                raise TimeoutError(f"no call reached the gate within {self._timeout:g} s")

    def open(self) -> None:
        """Lets all calls through, for good."""
        self._opened.set()


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """One thing that goes wrong.

    The first five fields say *when*, the others *what*. Several effects of one fault, and several faults that match one
    call, add up; where two give a code to one key, the one that was added first does.
    """

    call: CallName | None = None
    """Which call; None is any."""
    keys: Collection[str] | None = None
    """Only calls that have one of these keys, and for ``code`` only these keys."""
    indices: Collection[int] | None = None
    """Only calls with a key at one of these indexes of the batch, and for ``code`` only these keys."""
    skip: int = 0
    """So many matching calls pass before it."""
    times: int | None = 1
    """How many matching calls it then meets; None is all."""

    before: Callable[[], object] | None = None
    """Runs before the call, in its thread, while no lock is held: waits, moves a clock, changes the pool."""
    after: Callable[[], object] | None = None
    """Runs after the call has done its work, before it answers."""
    code: int | None = None
    """The answer, in place of the store's."""
    error: BaseException | type[BaseException] | None = None
    """Is raised in place of an answer."""
    truncate: int | None = None
    """The list of answers ends after so many; the work is done for all keys."""
    is_done: bool = False
    """Whether the work that ``code`` or ``error`` speaks of is done all the same, as when only the answer is lost."""

    def __post_init__(self) -> None:
        """Refuses a fault that could never show.

        Raises:
            ValueError: An unknown call, no effect, or a number that makes no sense.
            TypeError: Keys that are one string.
        """
        if self.call is not None and self.call not in get_args(CallName):
            raise ValueError(f"{self.call!r} is no call of a store: {', '.join(get_args(CallName))}")
        if isinstance(self.keys, str):
            raise TypeError(f"keys is the string {self.keys!r}, of which every part would match: give a set")
        if all(effect is None for effect in (self.before, self.after, self.code, self.error, self.truncate)):
            raise ValueError("a fault without effect: give before, after, code, error or truncate")
        for name, number in (("skip", self.skip), ("times", self.times), ("truncate", self.truncate)):
            if number is not None and number < 0:
                raise ValueError(f"{name} is {number}: it counts, so it is not negative")

    def matches(self, call: CallName, keys: Sequence[str]) -> bool:
        """Tells whether a call is one that this fault is about, whatever was skipped before."""
        if self.call not in (None, call):
            return False
        return (self.keys is None and self.indices is None) or any(self.targets(keys))

    def targets(self, keys: Sequence[str]) -> Iterator[bool]:
        """Yields, per key of a batch, whether ``code`` is for it."""
        for index, key in enumerate(keys):
            yield (self.keys is None or key in self.keys) and (self.indices is None or index in self.indices)


class Faults:
    """The faults of one store. Safe to use from many threads."""

    def __init__(self) -> None:
        """Makes a store without faults."""
        self._lock = threading.Lock()
        self._num_seen: dict[Fault, int] = {}  # in the order in which they were added
        self._num_times: dict[Fault, int] = {}

    def add(self, fault: Fault) -> Fault:
        """Adds a fault, and returns it; one that is there already starts anew."""
        with self._lock:
            self._num_seen[fault] = self._num_times[fault] = 0
        return fault

    def remove(self, fault: Fault) -> None:
        """Takes a fault away; what it did stays known to `num_times`."""
        with self._lock:
            self._num_seen.pop(fault, None)

    def clear(self) -> None:
        """Takes all faults away."""
        with self._lock:
            self._num_seen.clear()

    @contextmanager
    def active(self, *faults: Fault) -> Iterator[None]:
        """Adds faults for the time of a ``with``."""
        for fault in faults:
            self.add(fault)
        try:
            yield
        finally:
            for fault in faults:
                self.remove(fault)

    def num_times(self, fault: Fault) -> int:
        """Returns how many calls a fault has met."""
        with self._lock:
            return self._num_times.get(fault, 0)

    def run_batch(
        self, call: CallName, keys: Sequence[str], work: Callable[[Sequence[int]], Sequence[int]]
    ) -> list[int]:
        """Runs a call that answers per key.

        Args:
            call: Which call.
            keys: Its keys.
            work: Does the work for the keys at the given indexes, and returns one answer for each.
        """
        faults = self._meet(call, keys)
        answers = _run(faults, keys, work)
        return answers[: min([len(answers), *(fault.truncate for fault in faults if fault.truncate is not None)])]

    def run(self, call: CallName, work: Callable[[], int]) -> int:
        """Runs a call that gives one answer."""
        (answer,) = _run(self._meet(call, ()), ("",), lambda indices: [work() for _ in indices])
        return answer

    def _meet(self, call: CallName, keys: Sequence[str]) -> list[Fault]:
        """Counts a call against each fault, and returns those that it meets."""
        met = []
        with self._lock:
            for fault in [fault for fault in self._num_seen if fault.matches(call, keys)]:
                self._num_seen[fault] += 1
                num_after_skip = self._num_seen[fault] - fault.skip
                if num_after_skip > 0 and (fault.times is None or num_after_skip <= fault.times):
                    self._num_times[fault] += 1
                    met.append(fault)
        return met


def _run(faults: Sequence[Fault], keys: Sequence[str], work: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """Runs a call with the faults that it meets; returns one answer per key."""
    for fault in faults:
        if fault.before is not None:
            fault.before()
    for fault in faults:
        if fault.error is not None and not fault.is_done:
            raise fault.error
    answers, skipped = _coded(faults, keys)
    indices = [index for index in range(len(keys)) if index not in skipped]
    done = dict(zip(indices, work(indices), strict=True))
    for fault in faults:
        if fault.after is not None:
            fault.after()
    for fault in faults:
        if fault.error is not None:
            raise fault.error
    return [answers[index] if index in answers else done[index] for index in range(len(keys))]


def _coded(faults: Sequence[Fault], keys: Sequence[str]) -> tuple[dict[int, int], set[int]]:
    """Returns the codes that faults give, by index, and the indexes for which no work is to be done."""
    answers: dict[int, int] = {}
    skipped: set[int] = set()
    for fault in faults:
        if fault.code is None:
            continue
        for index, is_target in enumerate(fault.targets(keys)):
            if is_target and index not in answers:
                answers[index] = fault.code
                if not fault.is_done:
                    skipped.add(index)
    return answers, skipped
