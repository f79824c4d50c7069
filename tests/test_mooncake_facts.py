"""What Mooncake was measured to do, against the real store: a release that changes one of these is noticed here."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from mooncrate import mooncake
from mooncrate.errors import StoreError
from mooncrate.master import MasterProcess
from mooncrate.store import GuardedStore

MIB = 1 << 20
OBJECT_BYTES = 1000
Buffer = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def store(master: MasterProcess) -> Iterator[GuardedStore]:
    """A client that contributes memory."""
    with mooncake.connect(master.address, segment_bytes=64 * MIB) as connected:
        yield connected


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"facts/{request.node.name}"


@pytest.fixture(scope="module")
def buffer(store: GuardedStore) -> Iterator[Buffer]:
    """Registered memory with a pattern of period 251."""
    memory = (np.arange(4 * OBJECT_BYTES) % 251).astype(np.uint8)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    yield memory
    assert store.unregister_buffer(memory.ctypes.data) == 0


def _put(store: GuardedStore, keys: Sequence[str], memory: Buffer) -> list[int]:
    address = memory.ctypes.data
    return store.batch_put_from_multi_buffers(list(keys), [[address]] * len(keys), [[OBJECT_BYTES]] * len(keys))


def _get(store: GuardedStore, key: str, memory: Buffer, size: int = OBJECT_BYTES) -> int:
    (code,) = store.batch_get_into_multi_buffers([key], [[memory.ctypes.data]], [[size]])
    return code


def test_put_exists_and_get_give_back_the_bytes(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert store.batch_is_exist([key, key + "?"]) == [0, 0]
    assert _put(store, [key], buffer) == [0]
    assert store.batch_is_exist([key, key + "?"]) == [1, 0]
    got = np.zeros(OBJECT_BYTES, np.uint8)
    assert store.register_buffer(got.ctypes.data, got.nbytes) == 0
    assert _get(store, key, got) == OBJECT_BYTES
    assert store.unregister_buffer(got.ctypes.data) == 0
    np.testing.assert_array_equal(got, buffer[:OBJECT_BYTES])


def test_a_second_put_of_a_key_answers_0_and_keeps_the_first_bytes(
    store: GuardedStore, buffer: Buffer, key: str
) -> None:
    assert _put(store, [key, key], buffer) == [0, 0]
    assert _put(store, [key], buffer[7:]) == [0]
    got = np.zeros(OBJECT_BYTES, np.uint8)
    assert _get(store, key, got) == OBJECT_BYTES
    np.testing.assert_array_equal(got, buffer[:OBJECT_BYTES])


def test_a_get_into_more_than_the_object_fails_with_800(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert _put(store, [key], buffer) == [0]
    assert _get(store, key, buffer, OBJECT_BYTES + 1) == -800


def test_a_get_into_less_than_the_object_fails_with_600(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert _put(store, [key], buffer) == [0]
    assert _get(store, key, buffer, OBJECT_BYTES - 1) == -600


def test_a_get_of_an_absent_key_fails_with_704(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert _get(store, key, buffer) == -704


def test_memory_that_was_never_registered_works_over_tcp(store: GuardedStore, key: str) -> None:
    assert _put(store, [key], np.ones(OBJECT_BYTES, np.uint8)) == [0]
    got = np.zeros(OBJECT_BYTES, np.uint8)
    assert _get(store, key, got) == OBJECT_BYTES
    assert (got == 1).all()


def test_registering_a_range_again_or_inside_another_fails_with_600(store: GuardedStore, buffer: Buffer) -> None:
    assert store.register_buffer(buffer.ctypes.data, buffer.nbytes) == -600
    assert store.register_buffer(buffer.ctypes.data + 8, 8) == -600


def test_rows_may_be_tuples_of_several_regions(store: GuardedStore, buffer: Buffer, key: str) -> None:
    base = buffer.ctypes.data
    assert store.batch_put_from_multi_buffers([key], [(base + 500, base)], [(100, 200)]) == [0]
    got = np.zeros(300, np.uint8)
    row = (got.ctypes.data, got.ctypes.data + 250)
    assert store.batch_get_into_multi_buffers([key], [row], [(250, 50)]) == [300]
    np.testing.assert_array_equal(got, np.concatenate([buffer[500:600], buffer[:200]]))


def test_a_row_count_that_differs_from_the_key_count_fails_every_key(
    store: GuardedStore, buffer: Buffer, key: str
) -> None:
    base = buffer.ctypes.data
    keys = [f"{key}/{index}" for index in range(3)]
    assert store.batch_put_from_multi_buffers(keys, [[base]] * 2, [[8]] * 2) == [-600] * 3
    assert store.batch_get_into_multi_buffers(keys, [[base]] * 2, [[8]] * 2) == [-600] * 3


def test_an_empty_row_or_an_empty_key_fails_with_600(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert store.batch_put_from_multi_buffers([key], [[]], [[]]) == [-600]
    assert store.batch_put_from_multi_buffers([""], [[buffer.ctypes.data]], [[8]]) == [-600]


def test_remove_by_regex_searches_and_does_not_match(store: GuardedStore, buffer: Buffer, key: str) -> None:
    keys = [f"{key}/a{digit}b" for digit in (5, 6, 55)]
    assert _put(store, keys, buffer) == [0, 0, 0]
    assert store.remove_by_regex(f"^{re.escape(key)}/5", True) == 0
    assert store.remove_by_regex(f"{re.escape(key[3:])}/a5", True) == 2
    assert store.batch_is_exist(keys) == [0, 1, 0]


def test_replicas_are_described_per_key(store: GuardedStore, buffer: Buffer, key: str) -> None:
    assert _put(store, [key], buffer) == [0]
    (replicas,) = store.batch_get_replica_desc([key]).values()
    assert len(replicas) == 1


def test_a_client_without_memory_puts_looks_up_and_gets(
    master: MasterProcess, store: GuardedStore, buffer: Buffer, key: str
) -> None:
    with mooncake.connect(master.address) as other:
        assert _put(other, [key], buffer) == [0]
        assert other.batch_is_exist([key]) == store.batch_is_exist([key]) == [1]
        got = np.zeros(OBJECT_BYTES, np.uint8)
        assert _get(other, key, got) == OBJECT_BYTES
    np.testing.assert_array_equal(got, buffer[:OBJECT_BYTES])


def test_a_full_pool_and_a_dead_master() -> None:
    memory = np.ones(MIB, np.uint8)
    with (
        MasterProcess() as master,
        mooncake.connect(master.address, segment_bytes=16 * MIB) as store,
    ):
        keys = [f"full/{index}" for index in range(32)]
        codes = store.batch_put_from_multi_buffers(keys, [[memory.ctypes.data]] * 32, [[MIB]] * 32)
        assert set(codes) == {0, -200}
        os.kill(master.pid, signal.SIGKILL)
        assert all(answer < 0 for answer in store.batch_is_exist(keys))
        assert store.health_check() == 0  # the fact: it says nothing about the master
        assert store.close() == 0


def test_calls_after_close_are_exceptions_and_closing_twice_is_fine(master: MasterProcess, buffer: Buffer) -> None:
    store = mooncake.connect(master.address)
    assert (store.close(), store.close()) == (0, 0)
    with pytest.raises(StoreError, match=r"batch_is_exist was called after close\(\)"):
        store.batch_is_exist(["k"])
    with pytest.raises(StoreError, match=r"batch_put_from_multi_buffers was called after close\(\)"):
        _put(store, ["k"], buffer)


IMPORTS = "import sys\nfrom mooncake.store import MooncakeDistributedStore"
BEFORE_SETUP = "store = MooncakeDistributedStore()"
AFTER_CLOSE = f"""{BEFORE_SETUP}
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]) == 0
assert (store.close(), store.close()) == (0, 0)"""


@pytest.mark.parametrize("situation", [BEFORE_SETUP, AFTER_CLOSE], ids=["before set-up", "after close"])
def test_without_the_guard_the_process_dies(master: MasterProcess, situation: str) -> None:
    """The reason why the guard exists; once this fails, it may go."""
    program = f"{IMPORTS}\n{situation}\nstore.batch_is_exist(['k'])"
    finished = subprocess.run(
        [sys.executable, "-c", program, master.address], stderr=subprocess.PIPE, timeout=120, check=False
    )
    assert finished.returncode == -signal.SIGSEGV, finished.stderr.decode()


def test_the_installed_wheel_is_reported() -> None:
    wheel = mooncake.capabilities()
    assert wheel is mooncake.capabilities()
    assert wheel.distribution in mooncake.DISTRIBUTIONS
    assert re.match(r"\d+\.\d+", wheel.version)
    assert wheel.has_device_memory == ("non-cuda" not in wheel.distribution)
    assert wheel.has_group_ids
    assert wheel.has_tenants


def test_an_object_goes_to_the_segment_that_a_put_prefers(store: GuardedStore, buffer: Buffer, key: str) -> None:
    """A segment that is not there is no reason to refuse: the object lies somewhere else."""
    config = mooncake.replicate_config(preferred_segment="127.0.0.1:1")
    rows = [[buffer.ctypes.data]], [[OBJECT_BYTES]]
    assert store.batch_put_from_multi_buffers([key], *rows, config) == [0]
    assert store.batch_is_exist([key]) == [1]
