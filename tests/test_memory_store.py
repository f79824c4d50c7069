"""The store in memory beyond the contract: what it refuses, what it can be told to do wrong, and threads."""

import doctest
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncrate import memory_pool, memory_store, store_faults
from mooncrate.errors import StoreError
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.store import GuardedStore, Store
from mooncrate.store_faults import Fault, Gate, ManualClock
from store_contract import Memory, get, pattern, put

WAIT_SECONDS = 30.0
KIB = 1 << 10


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryPool(64 * KIB, clock=ManualClock()))


@pytest.fixture
def memory(store: MemoryStore) -> Memory:
    """4 KiB of registered memory with a pattern."""
    memory = pattern(4 * KIB)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    return memory


@pytest.mark.parametrize("module", [memory_pool, memory_store, store_faults])
def test_the_examples_in_the_docstrings_run(module: object) -> None:
    failed, attempted = doctest.testmod(module)  # type: ignore[arg-type]
    assert attempted
    assert not failed


def test_it_is_a_store_and_can_be_guarded(store: MemoryStore) -> None:
    as_store: Store = store
    with GuardedStore(as_store, is_set_up=True) as guarded:
        assert guarded.batch_is_exist(["a"]) == [0]
    with pytest.raises(StoreError, match=r"batch_is_exist was called after close\(\)"):
        store.batch_is_exist(["a"])


def test_calls_are_logged_on_request(memory: Memory) -> None:
    log: list[Call] = []
    store = MemoryStore(require_registered=False, log=log)
    put(store, ["a", "b"], memory[:8])
    store.batch_is_exist(["b", "?"])
    store.health_check()
    assert log == [Call("put", ("a", "b"), (0, 0)), Call("exists", ("b", "?"), (1, 0)), Call("health", (), (0,))]


# Registered memory.


@pytest.mark.parametrize(("start", "num_bytes"), [(-1, 8), (4 * KIB - 7, 8), (0, 4 * KIB + 1), (8 * KIB, 1)])
def test_memory_outside_a_registered_range_is_800_and_not_touched(
    store: MemoryStore, memory: Memory, start: int, num_bytes: int
) -> None:
    around = np.zeros(16 * KIB, np.uint8)
    base = around.ctypes.data + KIB
    assert store.register_buffer(base, 4 * KIB) == 0
    rows = [[base + 8, base + start]], [[8, num_bytes]]
    assert store.batch_put_from_multi_buffers(["a"], *rows) == [-800]
    assert store.pool.put("b", bytes([7]) * (8 + num_bytes)) == 0
    assert store.batch_get_into_multi_buffers(["b"], *rows) == [-800]
    assert not around.any()
    assert store.pool.keys() == ["b"]
    assert put(store, ["c"], memory) == [0]


def test_two_ranges_that_touch_are_not_one(store: MemoryStore) -> None:
    memory = pattern(200)
    base = memory.ctypes.data
    assert (store.register_buffer(base + 100, 100), store.register_buffer(base, 100)) == (0, 0)
    rows = [[base + 50], [base + 50, base + 100]], [[100], [50, 50]]
    assert store.batch_put_from_multi_buffers(["a", "b"], *rows) == [-800, 0]


def test_a_range_that_leaves_the_address_space_is_600(store: MemoryStore) -> None:
    assert store.register_buffer(2**64 - 8, 9) == -600
    assert store.register_buffer(2**64 - 8, 8) == 0
    assert store.unregister_buffer(2**64 - 8) == 0
    with pytest.raises(TypeError):
        store.register_buffer(-1, 8)
    with pytest.raises(TypeError):
        store.register_buffer(8, 2**64)


def test_registrations_belong_to_one_client(store: MemoryStore, memory: Memory) -> None:
    other = MemoryStore(store.pool)
    assert put(other, ["a"], memory[:8]) == [-800]
    assert other.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    assert put(other, ["a"], memory[:8]) == [0]


def test_a_get_with_fewer_sizes_than_addresses_is_600(store: MemoryStore, memory: Memory) -> None:
    base = memory.ctypes.data
    assert put(store, ["a"], memory[:8]) == [0]
    assert store.batch_get_into_multi_buffers(["a"], [[base, base]], [[8]]) == [-600]


# Room and time.


def test_eviction_is_due_by_the_clock_and_spares_leased_objects(memory: Memory) -> None:
    clock = ManualClock()
    store = MemoryStore(MemoryPool(8 * KIB, clock=clock), require_registered=False)
    assert put(store, list("abcdefgh"), memory[:KIB]) == [0] * 8
    assert store.batch_is_exist(["a"]) == [1]
    assert put(store, ["i"], memory[:KIB]) == [-200]
    clock.advance(0.99)
    assert put(store, ["i"], memory[:KIB]) == [-200]
    clock.advance(0.01)
    assert put(store, ["i"], memory[:KIB]) == [0]
    assert store.pool.keys() == list("acdefghi")


def test_eviction_makes_room_for_the_largest_object_that_found_none(memory: Memory) -> None:
    clock = ManualClock()
    store = MemoryStore(MemoryPool(8 * KIB, clock=clock), require_registered=False)
    assert put(store, list("abcdefgh"), memory[:KIB]) == [0] * 8
    assert put(store, ["i", "j", "k"], memory[:8], memory[: 3 * KIB], memory[:KIB]) == [-200] * 3
    assert store.pool.put("too large for ever", bytes(9 * KIB)) == -200
    clock.advance(1.0)
    assert put(store, ["j"], memory[: 3 * KIB]) == [0]
    assert store.pool.keys() == list("defghj")


def test_a_pool_of_leased_objects_stays_full_until_a_lease_ends(memory: Memory) -> None:
    clock = ManualClock()
    store = MemoryStore(MemoryPool(2 * KIB, clock=clock), require_registered=False)
    assert put(store, ["a", "b"], memory[:KIB]) == [0, 0]
    assert store.batch_is_exist(["a", "b"]) == [1, 1]
    for _ in range(9):
        assert put(store, ["c"], memory[:KIB]) == [-200]
        clock.advance(1.0)
    assert store.pool.evict() == 0
    clock.advance(1.0)
    assert put(store, ["c"], memory[:KIB]) == [0]


def test_eviction_can_be_asked_for(store: MemoryStore, memory: Memory) -> None:
    assert put(store, list("abcd"), memory[:KIB]) == [0] * 4
    assert store.pool.evict() == 0
    assert store.pool.evict(num_bytes=62 * KIB) == 2
    assert store.pool.keys() == ["c", "d"]
    assert store.pool.used_bytes == 2 * KIB


def test_a_key_that_is_dropped_is_a_miss(store: MemoryStore, memory: Memory) -> None:
    assert put(store, ["a", "b"], memory[:8]) == [0, 0]
    assert store.batch_is_exist(["a", "b"]) == [1, 1]
    assert store.pool.drop(["b", "?"]) == 1
    assert get(store, ["a", "b"], memory[:8], memory[8:16]) == [8, -704]
    with pytest.raises(KeyError):
        store.pool.read("b")


def test_a_client_that_dies_leaves_ghosts_until_the_master_notices(memory: Memory) -> None:
    clock = ManualClock()
    pool = MemoryPool(0, clock=clock)
    owner = MemoryStore(pool, segment_bytes=8 * KIB, require_registered=False)
    other = MemoryStore(pool, require_registered=False)
    target = np.zeros(8, np.uint8)
    assert put(owner, ["a"], memory[:8]) == [0]
    owner.die()
    with pytest.raises(StoreError):
        owner.health_check()
    assert other.batch_is_exist(["a"]) == [1]
    assert put(other, ["a"], memory[:8]) == [0]
    assert get(other, ["a"], target) == [-800]
    assert put(other, ["b"], memory[:8]) == [-200]
    assert pool.evict() == 0
    clock.advance(10.0)
    assert other.batch_is_exist(["a"]) == [0]
    assert get(other, ["a"], target) == [-704]
    assert not target.any()
    assert pool.num_bytes == 0


def test_without_a_master_no_call_on_the_pool_works(store: MemoryStore, memory: Memory) -> None:
    assert put(store, ["a"], memory[:8]) == [0]
    store.pool.stop_master()
    assert not store.pool.is_master_up
    assert store.batch_is_exist(["a"]) == [-900]
    assert (store.remove_by_regex("a", True), store.remove_all(True)) == (-900, -900)
    assert store.batch_get_replica_desc(["a"]) == {}
    assert store.health_check() == 0
    store.pool.start_master()
    assert store.pool.keys() == []
    assert store.pool.used_bytes == 0


@pytest.mark.parametrize(("key", "data"), [("", b"x"), ("a", b"")])
def test_what_cannot_be_put_by_address_cannot_be_put_as_bytes(store: MemoryStore, key: str, data: bytes) -> None:
    assert store.pool.put(key, data) == -600
    assert store.pool.keys() == []


# Faults.


def test_a_code_for_some_keys_leaves_the_others_alone(store: MemoryStore, memory: Memory) -> None:
    fault = store.faults.add(Fault(call="put", keys={"b", "?"}, code=-800))
    assert put(store, ["a", "b", "c"], memory[:8]) == [0, -800, 0]
    assert store.pool.keys() == ["a", "c"]
    assert put(store, ["b"], memory[:8]) == [0]
    assert store.faults.num_times(fault) == 1


def test_a_lost_answer_is_not_lost_work(store: MemoryStore, memory: Memory) -> None:
    store.faults.add(Fault(call="put", indices={1}, code=-800, is_done=True))
    assert put(store, ["a", "b"], memory[:8]) == [0, -800]
    assert store.pool.keys() == ["a", "b"]
    store.faults.add(Fault(call="put", error=ConnectionError("lost"), is_done=True))
    with pytest.raises(ConnectionError, match="lost"):
        put(store, ["c"], memory[:8])
    assert store.pool.keys() == ["a", "b", "c"]
    store.faults.add(Fault(call="put", error=ConnectionError))
    with pytest.raises(ConnectionError):
        put(store, ["d"], memory[:8])
    assert store.pool.keys() == ["a", "b", "c"]


def test_only_matching_calls_are_counted(store: MemoryStore) -> None:
    fault = store.faults.add(Fault(call="exists", keys={"b"}, skip=1, times=2, code=-1))
    calls = [["a"], ["b"], ["a", "b"], ["a"], ["b"], ["b"]]
    answers = [store.batch_is_exist(keys) for keys in calls]
    assert answers == [[0], [0], [0, -1], [0], [-1], [0]]
    assert store.faults.num_times(fault) == 2


def test_the_first_of_two_codes_counts_and_the_shortest_list(store: MemoryStore) -> None:
    faults = [Fault(indices={0}, code=-1), Fault(code=-2), Fault(truncate=3), Fault(truncate=2), Fault(truncate=9)]
    with store.faults.active(*faults):
        assert store.batch_is_exist(["a", "b", "c", "d"]) == [-1, -2]
    assert [store.faults.num_times(fault) for fault in faults] == [1] * 5
    assert store.batch_is_exist(["a"]) == [0]


def test_a_truncated_answer_may_be_empty(store: MemoryStore, memory: Memory) -> None:
    store.faults.add(Fault(call="put", truncate=0))
    assert put(store, ["a"], memory[:8]) == []
    assert store.pool.keys() == ["a"]


def test_calls_without_keys_can_fail(store: MemoryStore, memory: Memory) -> None:
    with store.faults.active(Fault(call="register", skip=1, code=-600), Fault(call="unregister", code=-1)):
        other = pattern(16)
        assert store.register_buffer(other.ctypes.data, 8) == 0
        assert store.register_buffer(other.ctypes.data + 8, 8) == -600
        assert store.unregister_buffer(other.ctypes.data) == -1
        assert store.unregister_buffer(other.ctypes.data) == 0
    assert put(store, ["a"], memory[:8]) == [0]
    with store.faults.active(
        Fault(call="describe", code=-1), Fault(call="health", code=2), Fault(call="remove", code=-9)
    ):
        assert store.batch_get_replica_desc(["a"]) == {}
        assert store.health_check() == 2
        assert store.remove_all(True) == -9
        assert list(store.batch_get_replica_desc(["a"])) == ["a"]
    with store.faults.active(Fault(call="close", error=ConnectionError)), pytest.raises(ConnectionError):
        store.close()
    assert store.pool.keys() == ["a"]
    assert store.close() == 0


def test_a_key_can_vanish_between_lookup_and_load(store: MemoryStore, memory: Memory) -> None:
    assert put(store, ["a", "b"], memory[:8]) == [0, 0]
    store.faults.add(Fault(call="exists", after=partial(store.pool.drop, ["b"])))
    assert store.batch_is_exist(["a", "b"]) == [1, 1]
    assert get(store, ["a", "b"], memory[:8], memory[8:16]) == [8, -704]


def test_a_master_can_die_during_a_call(store: MemoryStore, memory: Memory) -> None:
    assert put(store, ["a"], memory[:8]) == [0]
    store.faults.add(Fault(call="get", before=store.pool.stop_master))
    assert get(store, ["a"], memory[:8]) == [-900]


def test_one_call_hangs_while_another_goes_on(store: MemoryStore) -> None:
    gate = Gate()
    store.faults.add(Fault(call="exists", keys={"slow"}, before=gate.hold, times=None))
    with ThreadPoolExecutor() as executor:
        calls = [executor.submit(store.batch_is_exist, ["slow"]) for _ in range(2)]
        gate.wait_until_reached(2)
        assert store.batch_is_exist(["fast"]) == [0]
        assert not any(call.done() for call in calls)
        gate.open()
        assert [call.result(WAIT_SECONDS) for call in calls] == [[0], [0]]
    assert store.batch_is_exist(["slow"]) == [0]


def test_a_gate_that_is_forgotten_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="nobody opened the gate within 0 s"):
        Gate(timeout=0.0).hold()
    with pytest.raises(TimeoutError, match="no call reached the gate within 0 s"):
        Gate(timeout=0.0).wait_until_reached()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Fault(call="got", code=-1), ValueError),  # type: ignore[arg-type]
        (lambda: Fault(call="get"), ValueError),
        (lambda: Fault(keys={"a"}, times=2), ValueError),
        (lambda: Fault(code=-1, skip=-1), ValueError),
        (lambda: Fault(code=-1, times=-1), ValueError),
        (lambda: Fault(truncate=-1), ValueError),
        (lambda: Fault(code=-1, keys="abc"), TypeError),
    ],
)
def test_a_fault_that_could_not_show_is_refused(make: Callable[[], Fault], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


# Threads.


def test_threads_see_whole_objects_and_count_every_byte() -> None:
    """Each thread puts, drops and gets the same keys; an object is always of one put, and the room adds up."""
    num_threads, num_keys, num_rounds = 6, 5, 60
    store = MemoryStore(MemoryPool(3 * KIB), require_registered=False)
    barrier = threading.Barrier(num_threads)
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        source, target = np.full(KIB, number, np.uint8), np.zeros(KIB, np.uint8)
        barrier.wait(WAIT_SECONDS)
        for index in range(num_rounds):
            key = f"{index % num_keys}"
            assert put(store, [key], source)[0] in (0, -200)
            (code,) = get(store, [key], target)
            assert code in (KIB, -704)
            if code == KIB:
                assert len(set(target.tolist())) == 1
            store.pool.drop([key])

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(num_threads) as executor:
            for done in [executor.submit(work, number) for number in range(num_threads)]:
                done.result(WAIT_SECONDS)
    finally:
        sys.setswitchinterval(interval)
    assert store.pool.used_bytes == KIB * len(store.pool.keys())


class PoolMachine(RuleBasedStateMachine):
    """Puts, gets, removals and closings in any order, beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(4000, clock=ManualClock())
        self.store = MemoryStore(self.pool, require_registered=False)
        self.expected: dict[str, bytes] = {}

    keys = st.sampled_from("abcdef")

    @rule(key=keys, num_bytes=st.integers(1, 1500), start=st.integers(0, 250), cut=st.integers(0, 1500))
    def put(self, key: str, num_bytes: int, start: int, cut: int) -> None:
        memory = pattern(num_bytes, start)
        cut = min(cut, num_bytes)
        row = [memory.ctypes.data, memory.ctypes.data + cut], [cut, num_bytes - cut]
        (code,) = self.store.batch_put_from_multi_buffers([key], [row[0]], [row[1]])
        fits = sum(map(len, self.expected.values())) + num_bytes <= 4000
        assert code == (0 if fits or key in self.expected else -200)
        if code == 0:
            self.expected.setdefault(key, memory.tobytes())

    @rule(key=keys, difference=st.integers(-2, 2))
    def get(self, key: str, difference: int) -> None:
        expected = self.expected.get(key)
        target = np.zeros(max(1, len(expected or b"") + difference), np.uint8)
        (code,) = get(self.store, [key], target)
        if expected is None:
            assert code == -704
        elif target.nbytes == len(expected):
            assert code == target.nbytes
            assert target.tobytes() == expected
        else:
            assert code == (-800 if target.nbytes > len(expected) else -600)
            assert not target.any()

    @rule(keys=st.sets(keys))
    def drop(self, keys: set[str]) -> None:
        assert self.pool.drop(keys) == len(keys & self.expected.keys())
        self.expected = {key: data for key, data in self.expected.items() if key not in keys}

    @rule(keys=st.sets(keys, min_size=1))
    def remove(self, keys: set[str]) -> None:
        assert self.store.remove_by_regex(f"^[{''.join(sorted(keys))}]$", True) == len(keys & self.expected.keys())
        self.expected = {key: data for key, data in self.expected.items() if key not in keys}

    @rule()
    def restart_master(self) -> None:
        self.pool.stop_master()
        self.pool.start_master()
        self.expected = {}

    @invariant()
    def agrees(self) -> None:
        keys = self.pool.keys()
        assert {key: self.pool.read(key) for key in keys} == self.expected
        assert self.pool.used_bytes == sum(map(len, self.expected.values()))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
