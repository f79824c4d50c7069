"""Runs the contract of ``store_contract.py`` on both stores."""

from collections.abc import Callable, Iterator

import pytest

from mooncrate import mooncake
from mooncrate.master import MasterProcess
from mooncrate.memory_pool import MemoryPool
from mooncrate.memory_store import MemoryStore
from mooncrate.store import Store
from mooncrate.store_faults import ManualClock
from processes import wait_until
from store_contract import POOL_BYTES, Cluster, StoreContract

EVICTION_TIMEOUT_SECONDS = 60.0


class MemoryCluster:
    """A `MemoryPool` on a clock that moves only when a test waits."""

    def __init__(self) -> None:
        """Makes a pool without room: as with Mooncake, it is the clients that bring it."""
        self._clock = ManualClock()
        self._pool = MemoryPool(0, clock=self._clock)

    def connect(self, segment_bytes: int = 0) -> Store:
        """Makes a client that is as lenient as TCP."""
        return MemoryStore(self._pool, segment_bytes=segment_bytes, require_registered=False)

    def stop_master(self) -> None:
        """Stops the master."""
        self._pool.stop_master()

    def start_master(self) -> None:
        """Starts it again."""
        self._pool.start_master()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Moves the clock by a second at a time, at most a minute."""
        for _ in range(int(EVICTION_TIMEOUT_SECONDS)):
            if condition():
                return
            self._clock.advance(1.0)
        raise TimeoutError("what the test waits for did not happen within a minute")


class MooncakeCluster:
    """A real master, and clients over TCP on loopback."""

    def __init__(self, master: MasterProcess) -> None:
        """Uses a master that runs."""
        self._master = master
        self._stores: list[Store] = []

    def connect(self, segment_bytes: int = 0) -> Store:
        """Connects a client."""
        store = mooncake.connect(self._master.address, segment_bytes=segment_bytes)
        self._stores.append(store)
        return store

    def stop_master(self) -> None:
        """Stops the master."""
        self._master.stop()

    def start_master(self) -> None:
        """Starts another one, on the same port."""
        self._master = MasterProcess(self._master.rpc_port, self._master.metrics_port)
        self._master.start()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls."""
        wait_until(condition, "what the test waits for", EVICTION_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Closes the clients."""
        for store in self._stores:
            store.close()

    def stop(self) -> None:
        """Closes the clients, and stops the master."""
        self.close()
        self._master.stop()


@pytest.fixture(scope="module")
def memory_cluster() -> Cluster:
    """One pool for the tests that leave others alone."""
    return MemoryCluster()


@pytest.fixture(scope="module")
def mooncake_cluster(master: MasterProcess) -> Iterator[Cluster]:
    """The same with the master of the whole run."""
    cluster = MooncakeCluster(master)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def memory_store(memory_cluster: Cluster) -> Store:
    """A client for many tests."""
    return memory_cluster.connect(POOL_BYTES)


@pytest.fixture(scope="module")
def mooncake_store(mooncake_cluster: Cluster) -> Store:
    """The same, because closing a real one takes a second."""
    return mooncake_cluster.connect(POOL_BYTES)


class TestMemoryStore(StoreContract):
    """The store in memory."""

    @pytest.fixture
    def shared_cluster(self, memory_cluster: Cluster) -> Cluster:
        """Shared with other tests."""
        return memory_cluster

    @pytest.fixture
    def store(self, memory_store: Store) -> Store:
        """Shared with other tests."""
        return memory_store

    @pytest.fixture
    def cluster(self) -> Cluster:
        """A pool of the test's own."""
        return MemoryCluster()


class TestMooncake(StoreContract):
    """The real one."""

    @pytest.fixture
    def shared_cluster(self, mooncake_cluster: Cluster) -> Cluster:
        """Shared with other tests."""
        return mooncake_cluster

    @pytest.fixture
    def store(self, mooncake_store: Store) -> Store:
        """Shared with other tests."""
        return mooncake_store

    @pytest.fixture
    def cluster(self) -> Iterator[Cluster]:
        """A master of the test's own."""
        master = MasterProcess()
        master.start()
        cluster = MooncakeCluster(master)
        yield cluster
        cluster.stop()
