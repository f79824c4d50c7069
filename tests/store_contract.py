"""What every store answers: one suite, run on `MemoryStore` and on real Mooncake by ``test_store_contract.py``.

Each test is a fact that was measured on Mooncake. One that fails on Mooncake alone says that a newer release behaves in
another way; one that fails on `MemoryStore` alone, that tests which use it prove less than they seem to.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest

from mooncrate.errors import StoreError
from mooncrate.store import Store

MIB = 1 << 20
POOL_BYTES = 32 * MIB
OBJECT_BYTES = 1000
Memory = npt.NDArray[np.uint8]


class Cluster(Protocol):
    """A pool of its own, with a master that can be stopped."""

    def connect(self, segment_bytes: int = 0) -> Store:
        """Connects a client, which is closed after the test."""
        ...

    def stop_master(self) -> None:
        """Kills the master."""
        ...

    def start_master(self) -> None:
        """Starts it again, at the same address."""
        ...

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass until a condition holds."""
        ...


def row_of(memory: Memory) -> tuple[list[int], list[int]]:
    """Returns address and size of a whole array, as a row of one part."""
    return [memory.ctypes.data], [memory.nbytes]


def put(store: Store, keys: Sequence[str], *memories: Memory) -> list[int]:
    """Puts one array per key, or the same for all."""
    rows = [row_of(memory) for memory in (memories if len(memories) > 1 else memories * len(keys))]
    return store.batch_put_from_multi_buffers(list(keys), [row[0] for row in rows], [row[1] for row in rows])


def get(store: Store, keys: Sequence[str], *memories: Memory) -> list[int]:
    """Gets one key per array."""
    rows = [row_of(memory) for memory in memories]
    return store.batch_get_into_multi_buffers(list(keys), [row[0] for row in rows], [row[1] for row in rows])


def pattern(num_bytes: int = OBJECT_BYTES, start: int = 0) -> Memory:
    """Returns bytes of period 251, in which no two blocks of a usual size look alike."""
    return ((np.arange(num_bytes) + start) % 251).astype(np.uint8)


class StoreContract:
    """The suite.

    A subclass has the fixtures ``cluster``, a pool of the test's own, and ``shared_cluster`` and ``store``, a pool and
    a client that contributes ``POOL_BYTES``, for tests that leave nothing behind but keys of their own.
    """

    @pytest.fixture
    def key(self, request: pytest.FixtureRequest) -> str:
        """A key that no other test uses."""
        return f"contract/{request.node.name}"

    @pytest.fixture
    def memory(self, store: Store) -> Iterator[Memory]:
        """4,000 registered bytes with a pattern."""
        memory = pattern(4 * OBJECT_BYTES)
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        yield memory
        assert store.unregister_buffer(memory.ctypes.data) == 0

    @pytest.fixture
    def target(self, store: Store) -> Iterator[Memory]:
        """4,000 registered bytes of zero."""
        target = np.zeros(4 * OBJECT_BYTES, np.uint8)
        assert store.register_buffer(target.ctypes.data, target.nbytes) == 0
        yield target
        assert store.unregister_buffer(target.ctypes.data) == 0

    # Putting and getting.

    def test_put_exists_and_get_give_back_the_bytes(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        assert store.batch_is_exist([key, f"{key}?"]) == [0, 0]
        assert put(store, [key], memory[:OBJECT_BYTES]) == [0]
        assert store.batch_is_exist([key, f"{key}?", key]) == [1, 0, 1]
        assert get(store, [key], target[:OBJECT_BYTES]) == [OBJECT_BYTES]
        np.testing.assert_array_equal(target[:OBJECT_BYTES], memory[:OBJECT_BYTES])
        assert not target[OBJECT_BYTES:].any()

    def test_a_second_put_answers_0_and_keeps_the_first_bytes(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        assert put(store, [key, key], memory[:100], memory[7:107]) == [0, 0]
        assert put(store, [key], memory[9:109]) == [0]
        assert put(store, [key], memory[:200]) == [0]
        assert get(store, [key], target[:100]) == [100]
        np.testing.assert_array_equal(target[:100], memory[:100])

    def test_what_is_put_is_a_copy(self, store: Store, memory: Memory, target: Memory, key: str) -> None:
        before = memory[:100].copy()
        assert put(store, [key], memory[:100]) == [0]
        memory[:100] = 0
        assert get(store, [key], target[:100]) == [100]
        np.testing.assert_array_equal(target[:100], before)

    def test_rows_may_be_tuples_and_are_gathered_and_scattered_in_order(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        source, there = memory.ctypes.data, target.ctypes.data
        assert store.batch_put_from_multi_buffers([key], [(source + 500, source)], [(100, 200)]) == [0]
        parts = [(there + 10, there + 1000, there + 2000)], [(250, 49, 1)]
        assert store.batch_get_into_multi_buffers([key], *parts) == [300]
        object_bytes = np.concatenate([memory[500:600], memory[:200]])
        got = np.concatenate([target[10:260], target[1000:1049], target[2000:2001]])
        np.testing.assert_array_equal(got, object_bytes)
        assert np.count_nonzero(target) == np.count_nonzero(object_bytes)

    def test_a_get_into_more_than_the_object_is_800_and_writes_nothing(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        assert put(store, [key], memory[:100]) == [0]
        assert get(store, [key], target[:101]) == [-800]
        assert not target.any()

    def test_a_get_into_less_than_the_object_is_600_and_writes_nothing(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        assert put(store, [key], memory[:100]) == [0]
        assert get(store, [key], target[:99]) == [-600]
        assert not target.any()

    @pytest.mark.parametrize(("num_bytes", "code"), [(101, -800), (99, -600)])
    def test_a_failed_get_leaves_the_rest_of_its_batch_alone(
        self, store: Store, memory: Memory, target: Memory, key: str, num_bytes: int, code: int
    ) -> None:
        keys = [f"{key}/{index}" for index in range(3)]
        assert put(store, keys, memory[:100]) == [0, 0, 0]
        assert get(store, keys, target[:100], target[1000 : 1000 + num_bytes], target[2000:2100]) == [100, code, 100]
        np.testing.assert_array_equal(target[2000:2100], memory[:100])

    def test_an_absent_key_is_704_beside_one_that_is_there(
        self, store: Store, memory: Memory, target: Memory, key: str
    ) -> None:
        assert put(store, [key], memory[:100]) == [0]
        assert get(store, [f"{key}?", key, ""], target[:100], target[200:300], target[400:500]) == [-704, 100, -704]

    def test_an_empty_batch_has_no_answers(self, store: Store) -> None:
        assert store.batch_is_exist([]) == []
        assert store.batch_put_from_multi_buffers([], [], []) == []
        assert store.batch_get_into_multi_buffers([], [], []) == []
        assert store.batch_get_replica_desc([]) == {}

    # Arguments that make no sense.

    @pytest.mark.parametrize(("num_addrs", "num_sizes"), [(2, 2), (3, 2), (2, 3), (4, 4), (0, 0)])
    def test_a_row_count_that_differs_from_the_key_count_is_600_for_each_key(
        self, store: Store, memory: Memory, key: str, num_addrs: int, num_sizes: int
    ) -> None:
        keys = [f"{key}/{index}" for index in range(3)]
        rows = [[memory.ctypes.data]] * num_addrs, [[8]] * num_sizes
        assert store.batch_put_from_multi_buffers(keys, *rows) == [-600] * 3
        assert store.batch_get_into_multi_buffers(keys, *rows) == [-600] * 3
        assert store.batch_is_exist(keys) == [0] * 3

    def test_a_row_with_more_addresses_than_sizes_fails_the_whole_put(
        self, store: Store, memory: Memory, key: str
    ) -> None:
        base = memory.ctypes.data
        keys = [f"{key}/{index}" for index in range(2)]
        assert store.batch_put_from_multi_buffers(keys, [[base], [base, base]], [[8], [8]]) == [-600, -600]
        assert store.batch_put_from_multi_buffers(keys, [[base], [base]], [[8], [8, 8]]) == [-600, -600]
        assert store.batch_is_exist(keys) == [0, 0]

    def test_an_empty_row_or_key_is_600_for_that_key_alone(self, store: Store, memory: Memory, key: str) -> None:
        base = memory.ctypes.data
        keys = [f"{key}/0", f"{key}/1", "", f"{key}/3"]
        rows = [[base], [], [base], [base]], [[8], [], [8], [8]]
        assert store.batch_put_from_multi_buffers(keys, *rows) == [0, -600, -600, 0]
        assert store.batch_is_exist(keys) == [1, 0, 0, 1]
        assert store.batch_get_into_multi_buffers([f"{key}/0", f"{key}/1"], [[], []], [[], []]) == [-600, -704]

    def test_an_object_without_bytes_is_600_but_a_part_may_be_empty(
        self, store: Store, memory: Memory, key: str
    ) -> None:
        base = memory.ctypes.data
        keys = [f"{key}/0", f"{key}/1"]
        assert store.batch_put_from_multi_buffers(keys, [[base], [base, base]], [[0], [8, 0]]) == [-600, 0]
        assert store.batch_is_exist(keys) == [0, 1]

    @pytest.mark.parametrize("number", [-1, 1 << 64, "8", None])
    def test_what_is_no_unsigned_64_bit_number_is_a_type_error(
        self, store: Store, memory: Memory, key: str, number: object
    ) -> None:
        good, wrong = [[memory.ctypes.data]], [[number]]
        for call in (store.batch_put_from_multi_buffers, store.batch_get_into_multi_buffers):
            with pytest.raises(TypeError):
                call([key], wrong, [[8]])  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                call([key], good, wrong)  # type: ignore[arg-type]
        assert store.batch_is_exist([key]) == [0]

    # Registering memory.

    def test_a_range_that_touches_a_registered_one_is_600(self, store: Store) -> None:
        memory = np.zeros(6000, np.uint8)
        base = memory.ctypes.data + 1000
        assert store.register_buffer(base, 4000) == 0
        for start, num_bytes in [(0, 4000), (8, 8), (-100, 101), (3999, 100), (-100, 4200)]:
            assert store.register_buffer(base + start, num_bytes) == -600
        assert store.register_buffer(base + 4000, 100) == 0
        assert store.register_buffer(base - 100, 100) == 0
        assert store.register_buffer(base + 4200, 0) == -600
        for start in (0, 4000, -100):
            assert store.unregister_buffer(base + start) == 0

    def test_only_the_start_of_a_registered_range_can_be_unregistered(self, store: Store, memory: Memory) -> None:
        base = memory.ctypes.data
        assert store.unregister_buffer(base + 8) == -600
        assert store.unregister_buffer(base) == 0
        assert store.unregister_buffer(base) == -600
        assert store.register_buffer(base, memory.nbytes) == 0

    def test_memory_that_was_never_registered_works_over_tcp(self, store: Store, key: str) -> None:
        source, there = pattern(100), np.zeros(100, np.uint8)
        assert put(store, [key], source) == [0]
        assert get(store, [key], there) == [100]
        np.testing.assert_array_equal(there, source)

    # Removing, describing, leases.

    def test_remove_by_regex_searches_and_does_not_match(self, store: Store, memory: Memory, key: str) -> None:
        keys = [f"{key}/a{digit}b" for digit in (5, 6, 55)]
        assert put(store, keys, memory[:8]) == [0, 0, 0]
        assert store.remove_by_regex(f"^{re.escape(key)}/5", True) == 0
        assert store.remove_by_regex(f"{re.escape(key[3:])}/a5", True) == 2
        assert store.batch_is_exist(keys) == [0, 1, 0]
        assert store.remove_by_regex("(", True) == -600

    @pytest.mark.parametrize("takes_lease", ["exists", "get", "describe"])
    def test_a_lease_protects_from_removal_without_force(
        self, store: Store, memory: Memory, target: Memory, key: str, takes_lease: str
    ) -> None:
        keys = [f"{key}/leased", f"{key}/free"]
        assert put(store, keys, memory[:8]) == [0, 0]
        if takes_lease == "exists":
            assert store.batch_is_exist(keys[:1]) == [1]
        elif takes_lease == "get":
            assert get(store, keys[:1], target[:8]) == [8]
        else:
            assert len(store.batch_get_replica_desc(keys[:1])) == 1
        assert store.remove_by_regex(re.escape(key), False) == 1
        assert store.batch_is_exist(keys) == [1, 0]
        assert store.remove_by_regex(re.escape(key), True) == 1

    def test_only_keys_that_are_there_have_replicas(self, store: Store, memory: Memory, key: str) -> None:
        assert put(store, [key], memory[:100]) == [0]
        replicas = store.batch_get_replica_desc([key, f"{key}?"])
        assert list(replicas) == [key]
        (replica,) = replicas[key]
        assert replica.is_memory_replica()
        assert not replica.is_disk_replica()
        assert not replica.is_local_disk_replica()

    def test_remove_all_counts_what_it_removes(self, cluster: Cluster) -> None:
        store = cluster.connect(POOL_BYTES)
        memory = pattern()
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        assert put(store, ["a", "b"], memory) == [0, 0]
        assert store.batch_is_exist(["a"]) == [1]
        assert store.remove_all(False) == 1
        assert store.batch_is_exist(["a", "b"]) == [1, 0]
        assert (store.remove_all(True), store.remove_all(True)) == (1, 0)

    # Clients, room, and the master.

    def test_clients_exchange_objects_and_take_theirs_along_when_they_close(self, cluster: Cluster) -> None:
        owner, other = cluster.connect(POOL_BYTES), cluster.connect()
        memory, target = pattern(), np.zeros(OBJECT_BYTES, np.uint8)
        assert owner.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        assert other.register_buffer(target.ctypes.data, target.nbytes) == 0
        assert put(owner, ["a"], memory) == [0]
        assert get(other, ["a"], target) == [OBJECT_BYTES]
        np.testing.assert_array_equal(target, memory)
        assert owner.close() == 0
        assert other.batch_is_exist(["a"]) == [0]
        assert get(other, ["a"], target) == [-704]
        assert put(other, ["a"], target) == [-200]

    def test_a_full_pool_is_200_until_eviction_has_made_room(self, cluster: Cluster) -> None:
        store = cluster.connect(POOL_BYTES)
        memory = pattern(POOL_BYTES + 1)
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        assert put(store, ["large", "small"], memory, memory[:8]) == [-200, 0]
        assert store.remove_all(True) == 1
        num_fit, num_keys = POOL_BYTES // MIB, 40
        keys = [f"{index}" for index in range(num_keys)]
        codes = put(store, keys, memory[:MIB])
        assert codes == [0] * num_fit + [-200] * (num_keys - num_fit)
        cluster.wait_until(lambda: put(store, ["late"], memory[:MIB]) == [0])
        there = store.batch_is_exist([*keys, "late"])
        assert there[-1] == 1
        assert 0 < sum(there) <= num_fit
        assert store.batch_is_exist(keys[num_fit:]) == [0] * (num_keys - num_fit)

    def test_without_a_master_keys_are_900_and_afterwards_the_pool_is_empty(self, cluster: Cluster) -> None:
        store = cluster.connect(POOL_BYTES)
        memory, target = pattern(), np.zeros(OBJECT_BYTES, np.uint8)
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        assert store.register_buffer(target.ctypes.data, target.nbytes) == 0
        assert put(store, ["a", "b"], memory) == [0, 0]
        cluster.stop_master()
        assert store.batch_is_exist(["a", "?"]) == [-900, -900]
        assert put(store, ["a", "c"], memory) == [-900, -900]
        assert get(store, ["a", "b"], target, target) == [-900, -900]
        assert store.unregister_buffer(target.ctypes.data) == 0
        assert store.register_buffer(target.ctypes.data, target.nbytes) == 0
        assert not target.any()
        cluster.start_master()
        cluster.wait_until(lambda: put(store, ["c"], memory) == [0])
        assert store.batch_is_exist(["a", "b", "c"]) == [0, 0, 1]
        assert get(store, ["c", "a"], target, target) == [OBJECT_BYTES, -704]
        np.testing.assert_array_equal(target, memory)

    def test_the_health_check_says_0(self, store: Store) -> None:
        assert store.health_check() == 0

    def test_close_twice_is_0_and_later_calls_are_exceptions(self, shared_cluster: Cluster) -> None:
        store = shared_cluster.connect()
        assert (store.close(), store.close()) == (0, 0)
        late: list[Callable[[], object]] = [
            lambda: store.batch_is_exist(["k"]),
            lambda: store.batch_put_from_multi_buffers(["k"], [[8]], [[8]]),
            lambda: store.batch_get_into_multi_buffers(["k"], [[8]], [[8]]),
            lambda: store.register_buffer(8, 8),
            lambda: store.unregister_buffer(8),
            lambda: store.remove_by_regex("k", True),
            lambda: store.remove_all(True),
            lambda: store.batch_get_replica_desc(["k"]),
            store.health_check,
        ]
        for call in late:
            with pytest.raises(StoreError, match=r"after close\(\)"):
                call()
