"""Result codes and the guard, on a store that records what reaches it."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mooncrate.errors import MooncrateError, StoreError
from mooncrate.store import GuardedStore, ResultClass, ResultCode, Store, classify, describe

WAIT_SECONDS = 30.0


class RecordingStore:
    """Answers every call with 0, and remembers its name; calls of ``exists`` can be held up by the test."""

    def __init__(self, setup_code: int = 0) -> None:
        """Opens the gate: nothing is held up."""
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.setup_code = setup_code
        self.is_closed = False
        self.num_late_calls = 0
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def setup(self, *args: object) -> int:
        """Answers with the code that the test chose."""
        self._record("setup", *args)
        return self.setup_code

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Finds everything, once the gate is open."""
        self._record("batch_is_exist", keys)
        self.entered.release()
        assert self.gate.wait(WAIT_SECONDS)
        if self.is_closed:
            self.num_late_calls += 1
        return [1] * len(keys)

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        *rest: object,
    ) -> list[int]:
        """Stores nothing."""
        self._record("batch_put_from_multi_buffers", keys, all_buffer_ptrs, all_sizes, *rest)
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        """Reads nothing."""
        self._record("batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes)
        return [sum(sizes) for sizes in all_sizes]

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Registers nothing."""
        self._record("register_buffer", buffer_ptr, size)
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregisters nothing."""
        self._record("unregister_buffer", buffer_ptr)
        return 0

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes nothing."""
        self._record("remove_by_regex", regex_pattern, force)
        return 0

    def remove_all(self, force: bool = False) -> int:
        """Removes nothing."""
        self._record("remove_all", force)
        return 0

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        """Knows no replica."""
        self._record("batch_get_replica_desc", keys)
        return {}

    def health_check(self) -> int:
        """Is always healthy."""
        self._record("health_check")
        return 0

    def close(self) -> int:
        """Turns every later call into a late one."""
        self._record("close")
        self.is_closed = True
        return 0

    def _record(self, name: str, *args: object) -> None:
        if self.is_closed:
            self.num_late_calls += 1
        self.calls.append((name, args))


CALLS: dict[str, tuple[object, ...]] = {
    "batch_is_exist": (["k"],),
    "batch_put_from_multi_buffers": (["k"], [[1]], [[2]]),
    "batch_get_into_multi_buffers": (["k"], [(1, 3)], [(2, 4)]),
    "register_buffer": (1, 2),
    "unregister_buffer": (1,),
    "remove_by_regex": ("^k$", True),
    "remove_all": (True,),
    "batch_get_replica_desc": (["k"],),
    "health_check": (),
}
every_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def raw() -> RecordingStore:
    """A store that nobody guards yet."""
    return RecordingStore()


@pytest.fixture
def store(raw: RecordingStore) -> GuardedStore:
    """A guarded store that is set up."""
    guarded = GuardedStore(raw)
    assert guarded.setup("host", 7) == 0
    return guarded


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that have to be in flight at the same time."""
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def _call(store: GuardedStore, name: str) -> object:
    return getattr(store, name)(*CALLS[name])


def _in_forked_child(action: Callable[[], object]) -> str:
    """Runs an action in a forked child, and returns the message of its `StoreError`, or what it returned."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            text = repr(action())
        except StoreError as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, ResultClass.OK),
        (1, ResultClass.OK),
        (1 << 40, ResultClass.OK),
        (-704, ResultClass.MISS),
        (-707, ResultClass.MISS),
        (-200, ResultClass.PRESSURE),
        (-1, ResultClass.FAULT),
        (-600, ResultClass.FAULT),
        (-705, ResultClass.FAULT),
        (-800, ResultClass.FAULT),
        (-900, ResultClass.FAULT),
        (-(1 << 40), ResultClass.FAULT),
    ],
)
def test_codes_are_classified(code: int, expected: ResultClass) -> None:
    assert classify(code) is expected


def test_every_known_code_has_a_class_and_a_name() -> None:
    for code in ResultCode:
        assert classify(code) is classify(int(code))
        assert code.name in describe(code)
        assert classify(code).value in describe(code)


@every_call
def test_calls_pass_through_unchanged(store: GuardedStore, raw: RecordingStore, name: str) -> None:
    answer = _call(store, name)
    assert raw.calls == [("setup", ("host", 7)), (name, CALLS[name])]
    assert answer == getattr(raw, name)(*CALLS[name])


def test_put_passes_a_config_on(store: GuardedStore, raw: RecordingStore) -> None:
    store.batch_put_from_multi_buffers(["k"], [[1]], [[2]], "config")
    assert raw.calls[-1][1][-1] == "config"


@every_call
def test_calls_before_setup_are_refused(raw: RecordingStore, name: str) -> None:
    with pytest.raises(StoreError, match=f"{name} was called before set-up"):
        _call(GuardedStore(raw), name)
    assert not raw.calls


@every_call
def test_calls_after_close_are_refused(store: GuardedStore, raw: RecordingStore, name: str) -> None:
    store.close()
    with pytest.raises(StoreError, match=rf"{name} was called after close\(\)"):
        _call(store, name)
    assert raw.num_late_calls == 0


@every_call
def test_calls_in_a_forked_child_are_refused(store: GuardedStore, name: str) -> None:
    text = _in_forked_child(lambda: _call(store, name))
    assert name in text
    assert f"forked from process {os.getpid()}" in text


def test_setup_in_a_forked_child_is_refused(raw: RecordingStore) -> None:
    store = GuardedStore(raw)
    assert "setup was called in process" in _in_forked_child(store.setup)


def test_closing_in_a_forked_child_closes_nothing(store: GuardedStore, raw: RecordingStore) -> None:
    assert _in_forked_child(lambda: (store.close(), raw.is_closed)) == "(0, False)"
    assert store.batch_is_exist(["k"]) == [1]


def test_a_child_forked_during_a_call_is_refused_without_a_deadlock(
    store: GuardedStore, raw: RecordingStore, pool: ThreadPoolExecutor
) -> None:
    raw.gate.clear()
    call = pool.submit(store.batch_is_exist, ["k"])
    assert raw.entered.acquire(timeout=WAIT_SECONDS)
    with store._changed:  # as another thread might hold it at that moment
        assert "forked from" in _in_forked_child(store.health_check)
    raw.gate.set()
    assert call.result(WAIT_SECONDS) == [1]


def test_a_failed_setup_can_be_tried_again(raw: RecordingStore) -> None:
    raw.setup_code = -1
    store = GuardedStore(raw)
    assert store.setup() == -1
    with pytest.raises(StoreError, match="before set-up"):
        store.health_check()
    raw.setup_code = 0
    assert store.setup() == 0
    assert store.health_check() == 0


def test_a_setup_that_raises_leaves_the_store_before_setup(raw: RecordingStore) -> None:
    store = GuardedStore(raw)
    raw.setup_code = "no number"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no number"):
        store.setup()
    with pytest.raises(StoreError, match="before set-up"):
        store.health_check()


def test_setup_twice_and_after_close_is_refused(store: GuardedStore, raw: RecordingStore) -> None:
    with pytest.raises(StoreError, match="setup was called on a store that is set up already"):
        store.setup()
    store.close()
    with pytest.raises(StoreError, match="setup was called after close"):
        store.setup()
    assert [name for name, _ in raw.calls] == ["setup", "close"]


def test_close_is_idempotent_and_reaches_the_store_once(store: GuardedStore, raw: RecordingStore) -> None:
    assert (store.close(), store.close(), store.close()) == (0, 0, 0)
    assert [name for name, _ in raw.calls] == ["setup", "close"]


def test_close_before_setup_does_not_reach_the_store(raw: RecordingStore) -> None:
    assert GuardedStore(raw).close() == 0
    assert not raw.calls


def test_with_closes(raw: RecordingStore) -> None:
    with GuardedStore(raw, is_set_up=True) as guarded:
        store: Store = guarded  # as the type checker sees: a guarded store is a store
        assert store.health_check() == 0
    assert raw.is_closed
    assert "closed" in repr(guarded)


def test_an_exception_of_the_store_passes_and_is_no_call_in_flight(store: GuardedStore, raw: RecordingStore) -> None:
    with pytest.raises(TypeError):
        store.batch_is_exist(5)  # type: ignore[arg-type]
    assert store.close(timeout=0) == 0
    assert raw.is_closed


def test_close_waits_for_calls_in_flight_and_refuses_new_ones(
    store: GuardedStore, raw: RecordingStore, pool: ThreadPoolExecutor
) -> None:
    raw.gate.clear()
    calls = [pool.submit(store.batch_is_exist, ["k"]) for _ in range(3)]
    for _ in calls:
        assert raw.entered.acquire(timeout=WAIT_SECONDS)
    with pytest.raises(StoreError, match="not closed: 3 calls on the store still run after 0 s"):
        store.close(timeout=0)
    assert not raw.is_closed
    with pytest.raises(StoreError, match="health_check was called while the store is being closed"):
        store.health_check()
    closings = [pool.submit(store.close, WAIT_SECONDS) for _ in range(3)]
    raw.gate.set()
    assert [closing.result(WAIT_SECONDS) for closing in closings] == [0, 0, 0]
    assert [call.result(WAIT_SECONDS) for call in calls] == [[1], [1], [1]]
    assert raw.num_late_calls == 0
    assert [name for name, _ in raw.calls].count("close") == 1


@pytest.mark.parametrize("setup_code", [0, -1])
def test_close_waits_for_a_setup_in_flight(setup_code: int, pool: ThreadPoolExecutor) -> None:
    class SlowSetup(RecordingStore):
        def setup(self, *args: object) -> int:
            self.entered.release()
            assert self.gate.wait(WAIT_SECONDS)
            return super().setup(*args)

    raw = SlowSetup(setup_code)
    raw.gate.clear()
    store = GuardedStore(raw)
    setup = pool.submit(store.setup)
    assert raw.entered.acquire(timeout=WAIT_SECONDS)
    with pytest.raises(StoreError, match="while the store is still being set up"):
        store.health_check()
    with pytest.raises(StoreError, match="not closed: 1 calls"):
        store.close(timeout=0)
    raw.gate.set()
    assert setup.result(WAIT_SECONDS) == setup_code
    assert store.close() == 0
    assert raw.is_closed == (setup_code == 0)  # what never came up must not be closed: that crashes, too
    with pytest.raises(StoreError, match=r"after close\(\)"):
        store.health_check()


def test_no_call_reaches_a_closed_store_whatever_the_threads_do(pool: ThreadPoolExecutor) -> None:
    num_threads, num_rounds = 6, 40
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(num_rounds):
            raw = RecordingStore()
            store = GuardedStore(raw, is_set_up=True)
            barrier = threading.Barrier(num_threads + 1)

            def call_until_refused(store: GuardedStore = store, barrier: threading.Barrier = barrier) -> None:
                barrier.wait(WAIT_SECONDS)
                while True:
                    try:
                        store.batch_is_exist(["k"])
                    except MooncrateError:
                        return

            threads = [pool.submit(call_until_refused) for _ in range(num_threads)]
            barrier.wait(WAIT_SECONDS)
            assert store.close() == 0
            for thread in threads:
                thread.result(WAIT_SECONDS)
            assert raw.is_closed
            assert raw.num_late_calls == 0
            assert raw.calls[-1] == ("close", ())
    finally:
        sys.setswitchinterval(interval)
