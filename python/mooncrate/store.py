"""What mooncrate asks of a store, what the answers mean, and the guard that keeps calls from a store that is not there.

The real library has no notion of a call that comes too early or too late: before set-up, after ``close()`` and in a
forked child it reads memory that is not there and takes the process with it. `GuardedStore` turns each of these into a
`StoreError`, at the cost of a lock taken twice per call (2 to 5 microseconds, against 150 for the cheapest call).
"""

import enum
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from mooncrate.errors import StoreError

TCP_ADDRS_IN_FLIGHT: Final = 2048
"""Over TCP, unless the queue was made longer before the client was made: 1,024 that are queued, 1,024 that wait."""
CLOSE_TIMEOUT_SECONDS = 90.0
"""How long `GuardedStore.close` waits for calls in flight: a TCP batch over the limit takes 60 s to give up."""


class Store(Protocol):
    """The Mooncake calls that mooncrate uses, under Mooncake's names; it takes rows as lists or as tuples of int."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Returns 1 (there), 0 (not there) or -1 (error) per key, and takes a lease on every object found."""
        ...

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object = ...,
    ) -> list[int]:
        """Stores one object per key, gathered from one row of addresses; returns 0 or a negative code per key.

        ``config`` is Mooncake's ``ReplicateConfig``, a type that cannot be named without importing Mooncake.
        """
        ...

    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Scatters one object per key to one row of addresses; returns bytes read or a negative code per key."""
        ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Makes ``[buffer_ptr, buffer_ptr + size)`` known to the transport; returns 0 or a negative code."""
        ...

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Takes back a registration; returns 0 or a negative code."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool = ...) -> int:
        """Removes every key that the pattern is found in, not only full matches; returns their number."""
        ...

    def remove_all(self, force: bool = ...) -> int:
        """Removes every object; returns their number."""
        ...

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        """Returns where the replicas of each key lie."""
        ...

    def health_check(self) -> int:
        """Returns 0 when the client believes itself healthy; it goes on doing so while its master is dead."""
        ...

    def close(self) -> int:
        """Ends the client and takes the memory that it contributed, with its objects, out of the pool."""
        ...


class ResultCode(enum.IntEnum):
    """The codes that Mooncake was seen to answer with. Others exist; `classify` knows what to make of them."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_PARAMS = -600
    OBJECT_NOT_FOUND = -704
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    RPC_FAIL = -900


class ResultClass(enum.Enum):
    """What a caller should do about a code."""

    OK = "ok"
    """Done. A get is good only if its number also equals the bytes asked for."""
    MISS = "miss"
    """The object is not there, or no longer: shorten the prefix, recompute."""
    PRESSURE = "pressure"
    """The pool has no room: stop saving for a while."""
    FAULT = "fault"
    """Something is broken: transport, master, or the arguments of the call."""


_CLASS_OF_CODE: dict[int, ResultClass] = {
    ResultCode.NO_AVAILABLE_HANDLE: ResultClass.PRESSURE,
    ResultCode.OBJECT_NOT_FOUND: ResultClass.MISS,
    ResultCode.LEASE_EXPIRED: ResultClass.MISS,
}


def classify(code: int) -> ResultClass:
    """Returns the class of a code; negative codes that nobody has met yet are faults.

    >>> [classify(code).value for code in (65536, -704, -200, -12345)]
    ['ok', 'miss', 'pressure', 'fault']
    """
    if code >= 0:
        return ResultClass.OK
    return _CLASS_OF_CODE.get(code, ResultClass.FAULT)


def describe(code: int) -> str:
    """Returns a code with its name and class, for messages.

    >>> describe(-704)
    '-704 (OBJECT_NOT_FOUND, miss)'
    >>> describe(-12345)
    '-12345 (unknown, fault)'
    """
    try:
        name = ResultCode(code).name
    except ValueError:
        name = "unknown"
    return f"{code} ({name}, {classify(code).value})"


class _State(enum.Enum):
    """Where a guarded store stands; the value says when a refused call came."""

    NEW = "before set-up: connect first"
    SETTING_UP = "while the store is still being set up"
    READY = "on a store that is set up already"
    CLOSING = "while the store is being closed"
    CLOSED = "after close(): connect again"


@dataclass(frozen=True)
class Transport:
    """What the way between this process and the memory of the pool takes."""

    max_addrs_in_flight: int | None = TCP_ADDRS_IN_FLIGHT
    """Addresses in flight per peer over all threads of the process; None for no limit. One too many, and over TCP
    nearly all of a batch fails after a minute."""
    has_device_memory: bool = True
    """Whether it moves the memory of accelerators."""


UNKNOWN_TRANSPORT: Final = Transport()


class GuardedStore:
    """A store that answers calls which must not reach the library with `StoreError`. Safe to use from many threads.

    Rationale: state is checked and the call is counted under one lock, so that `close` either sees the call and waits
    for it, or the call sees the closing and is refused. A flag alone would leave a gap between check and call.

    Limitations: nothing here helps a forked child that leaves through ``sys.exit``, where the library's own exit
    handlers crash; leave through ``os._exit``, as `multiprocessing` does.
    """

    def __init__(
        self,
        raw: Store,
        *,
        is_set_up: bool = False,
        transport: Transport = UNKNOWN_TRANSPORT,
        queue_owner: object = None,
    ) -> None:
        """Wraps a store.

        Args:
            raw: The store itself; nobody else should hold it.
            is_set_up: Whether ``raw`` can be used as it is. If not, `setup` must come first.
            transport: What the way to the pool takes; if not given, what every way takes.
            queue_owner: Stands for the transport's queues, for stores that share them; ``raw`` if not given.
        """
        self.transport: Final = transport
        self.queue_owner: Final = raw if queue_owner is None else queue_owner
        self._raw: Store | None = raw
        self._pid = os.getpid()
        self._changed = threading.Condition()  # on an RLock: a signal handler may close while its own thread holds it
        self._state = _State.READY if is_set_up else _State.NEW
        self._num_calls = 0

    def __enter__(self) -> Self:
        """Returns the store."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the store."""
        self.close()

    def __repr__(self) -> str:
        """Names the state, never the store behind it."""
        return f"<GuardedStore {self._state.name.lower()}, {self._num_calls} calls in flight>"

    def setup(self, *args: object, **options: object) -> int:
        """Calls the raw store's ``setup``, and lets calls through from then on if it answers 0.

        Returns:
            The raw store's code. After any other than 0, set-up may be tried again.

        Raises:
            StoreError: The store is set up already, or closed, or belongs to another process.
        """
        with self._call("setup", _State.NEW, _State.SETTING_UP) as raw:
            new: Any = raw  # ``setup`` is no part of Store: only what is set up is one
            state = _State.NEW
            try:
                code = int(new.setup(*args, **options))
                state = _State.READY if code == 0 else _State.NEW
            finally:
                with self._changed:
                    if self._state is _State.SETTING_UP:
                        self._state = state
                    elif state is _State.NEW:  # closing meanwhile, and nothing came up that could be closed
                        self._raw = None
        return code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Calls `Store.batch_is_exist`."""
        with self._call("batch_is_exist") as raw:
            return raw.batch_is_exist(keys)

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: object = None,
    ) -> list[int]:
        """Calls `Store.batch_put_from_multi_buffers`; without ``config`` the store's default applies."""
        rest = () if config is None else (config,)
        with self._call("batch_put_from_multi_buffers") as raw:
            return raw.batch_put_from_multi_buffers(keys, all_buffer_ptrs, all_sizes, *rest)

    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Calls `Store.batch_get_into_multi_buffers`."""
        with self._call("batch_get_into_multi_buffers") as raw:
            return raw.batch_get_into_multi_buffers(keys, all_buffer_ptrs, all_sizes)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Calls `Store.register_buffer`."""
        with self._call("register_buffer") as raw:
            return raw.register_buffer(buffer_ptr, size)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Calls `Store.unregister_buffer`."""
        with self._call("unregister_buffer") as raw:
            return raw.unregister_buffer(buffer_ptr)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Calls `Store.remove_by_regex`."""
        with self._call("remove_by_regex") as raw:
            return raw.remove_by_regex(regex_pattern, force)

    def remove_all(self, force: bool = False) -> int:
        """Calls `Store.remove_all`."""
        with self._call("remove_all") as raw:
            return raw.remove_all(force)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        """Calls `Store.batch_get_replica_desc`."""
        with self._call("batch_get_replica_desc") as raw:
            return raw.batch_get_replica_desc(keys)

    def health_check(self) -> int:
        """Calls `Store.health_check`."""
        with self._call("health_check") as raw:
            return raw.health_check()

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> int:
        """Refuses new calls at once, waits for those in flight, then closes the raw store. Idempotent.

        In a forked child this does nothing: what belongs to the parent is not the child's to close.

        Args:
            timeout: Seconds to wait for calls in flight, another thread's ``close()`` among them.

        Returns:
            The raw store's code; 0 if there was nothing to close.

        Raises:
            StoreError: The timeout ended first. New calls stay refused, and `close` may be tried again.
        """
        if os.getpid() != self._pid:
            return 0
        with self._changed:
            if self._state is _State.NEW:  # before set-up the library crashes on close() as well
                self._state, self._raw = _State.CLOSED, None
            if self._state is _State.CLOSED:
                return 0
            self._state = _State.CLOSING
            if not self._changed.wait_for(lambda: not self._num_calls, timeout):
                raise StoreError(f"not closed: {self._num_calls} calls on the store still run after {timeout:g} s")
            raw, self._raw = self._raw, None
            if raw is None:  # closed by another thread while we waited, or never set up
                self._state = _State.CLOSED
                return 0
            self._num_calls += 1  # the closing is a call in flight too: another close() waits for it like for any
        try:
            return raw.close()
        finally:
            with self._changed:
                self._num_calls -= 1
                self._state = _State.CLOSED
                self._changed.notify_all()

    @contextmanager
    def _call(self, name: str, needed: _State = _State.READY, becomes: _State = _State.READY) -> Iterator[Store]:
        """Lends out the raw store for one call, or refuses.

        The process comes first, before the lock: in a forked child nobody is left to release it.
        """
        if (pid := os.getpid()) != self._pid:
            raise StoreError(
                f"{name} was called in process {pid}, forked from process {self._pid} that the store belongs to: "
                "connect in the child, after the fork"
            )
        with self._changed:
            raw = self._raw
            if raw is None or self._state is not needed:
                raise StoreError(f"{name} was called {self._state.value}")
            self._state = becomes
            self._num_calls += 1
        try:
            yield raw
        finally:
            with self._changed:
                self._num_calls -= 1
                if not self._num_calls:
                    self._changed.notify_all()


def borrow(store: Store) -> GuardedStore:
    """Returns a guard for a store that stays the caller's: closing it refuses calls, and leaves the store open."""
    transport = getattr(store, "transport", None)
    raw: Any = _Borrowed(store)
    return GuardedStore(
        raw,
        is_set_up=True,
        transport=transport if isinstance(transport, Transport) else UNKNOWN_TRANSPORT,
        queue_owner=getattr(store, "queue_owner", store),
    )


class _Borrowed:
    """A store of somebody else's: everything but ``close`` goes through."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> int:
        """Leaves it open."""
        return 0
