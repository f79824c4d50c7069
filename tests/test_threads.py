"""Threads that stand in each other's way: callbacks that hang, closes that meet, pools that share a transport."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import pytest

from mooncrate import CacheGroup, KVPool, PoolLimits, SaveResult
from mooncrate.errors import StoreError
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.store import GuardedStore, Transport
from mooncrate.store_faults import Fault, Gate
from toy_engine import ToyEngine, prompt, to_load, to_save

FULL = CacheGroup.full_attention(16)


@pytest.fixture
def log() -> list[Call]:
    """What the store was asked."""
    return []


@pytest.fixture
def store(log: list[Call]) -> MemoryStore:
    return MemoryStore(log=log)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([FULL])


@pytest.fixture
def pool(store: MemoryStore) -> Iterator[KVPool]:
    """A pool whose calls hold one chunk."""
    with open_pool(store, limits=PoolLimits(max_batch_integers=4)) as opened:
        yield opened


def open_pool(store: MemoryStore | GuardedStore, limits: PoolLimits | None = None) -> KVPool:
    return KVPool.open(model_name="m", groups=[FULL], store=store, limits=limits or PoolLimits())


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def num_registered(log: Sequence[Call]) -> int:
    """How much memory the store still knows."""
    return sum({"register": 1, "unregister": -1}.get(call.name, 0) for call in log)


# Registration


@pytest.mark.parametrize("call", ["put", "get"])
def test_a_registration_that_is_refused_leaves_what_runs_whole(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, log: list[Call], call: str
) -> None:
    engine.register(pool)
    hashes, gate = prompt("whole", 4), Gate()
    engine.compute(hashes, [[1, 2, 3, 4]])
    if call == "get":
        assert pool.save(to_save(hashes, [[1, 2, 3, 4]], 64)).result().is_complete
    store.faults.add(Fault(call=call, before=gate.hold))  # type: ignore[arg-type]
    if call == "put":
        job: Future[object] = pool.save(to_save(hashes, [[1, 2, 3, 4]], 64))  # type: ignore[assignment]
    else:
        job = pool.load(to_load(hashes, [[5, 6, 7, 8]], 64))  # type: ignore[assignment]
    gate.wait_until_reached()
    with pytest.raises(StoreError, match="1 jobs on the memory registered before still run"):
        engine.register(pool)
    gate.open()
    assert job.result(30).is_complete  # type: ignore[attr-defined]
    assert num_registered(log) == 2  # two layers, once
    engine.register(pool)
    assert pool.load(to_load(hashes, [[9, 10, 11, 12]], 64)).result(30).is_complete
    assert all(engine.holds(hashes, [[9, 10, 11, 12]], 0, chunk) for chunk in range(4))


# Lookups


def test_a_late_lookup_whose_callback_hangs_keeps_nobody_waiting(store: MemoryStore) -> None:
    store_gate, callback = Gate(), Gate()
    with open_pool(store, PoolLimits(num_lookup_threads=1)) as pool:
        store.faults.add(Fault(call="exists", before=store_gate.hold, times=None))
        # All of them become late in the same moment; each has a callback that hangs.
        late = [pool.lookup_async(33, prompt(f"late {number}", 2), timeout=0.05) for number in range(3)]
        for future in late:
            future.add_done_callback(lambda _: callback.hold())
        callback.wait_until_reached(3)
        assert [future.result(0) for future in late] == [0, 0, 0]
        assert pool.lookup(33, prompt("later", 2), timeout=0.05) == 0
        assert pool.metrics().counts["lookups_late"] == 4
        store_gate.open()
        callback.open()


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), GeneratorExit(), BaseException("a panic")])
@pytest.mark.parametrize("num_asked", [1, 3])
def test_whatever_a_lookup_or_its_callback_raises_the_next_one_is_answered(
    store: MemoryStore, engine: ToyEngine, error: BaseException, num_asked: int
) -> None:
    def fail(_: Future[int]) -> None:
        raise error

    hashes = prompt("answered", 2)
    with open_pool(store, PoolLimits(num_lookup_threads=1, max_stuck_lookups=0)) as pool:
        engine.register(pool)
        engine.compute(hashes, [[1, 2]])
        pool.save(to_save(hashes, [[1, 2]], 32)).result()
        fault, gate = store.faults.add(Fault(call="exists", error=error)), Gate()
        store.faults.add(Fault(call="exists", before=gate.hold, times=None))
        answers = [pool.lookup_async(33, hashes, timeout=60.0) for _ in range(num_asked)]
        for answer in answers:
            answer.add_done_callback(fail)
        gate.open()
        assert [answer.result(30) for answer in answers] == [0] * num_asked
        assert store.faults.num_times(fault) == 1
        assert pool.lookup(33, hashes, timeout=60.0) == 32
        assert pool.metrics().counts["lookups_failed"] == num_asked


# The transport


def test_pools_on_one_store_share_what_its_transport_takes(store: MemoryStore) -> None:
    limit, lock, in_flight, most = 4, threading.Lock(), [0], [0]
    put = store.batch_put_from_multi_buffers

    def counted(*args: Sequence[Sequence[int]]) -> list[int]:
        num = sum(map(len, args[1]))
        with lock:
            in_flight[0] += num
            most[0] = max(most[0], in_flight[0])
        try:
            return put(*args)  # type: ignore[arg-type]
        finally:
            with lock:
                in_flight[0] -= num

    store.batch_put_from_multi_buffers = counted  # type: ignore[assignment]
    transport = Transport(limit, has_device_memory=True)
    queues = partial(object)  # anything that can be referred to weakly
    clients = [GuardedStore(store, is_set_up=True, transport=transport, queue_owner=queues) for _ in range(2)]
    pools = [open_pool(clients[0]), open_pool(clients[0]), open_pool(clients[1])]
    block_ids, jobs = list(range(1, 17)), []
    engines = [ToyEngine([FULL]) for _ in pools]
    for number, (pool, engine) in enumerate(zip(pools, engines, strict=True)):
        engine.register(pool)
        hashes = prompt(f"shared {number}", 16)
        engine.compute(hashes, [block_ids])
        jobs.append(pool.save(to_save(hashes, [block_ids], 256)))
    assert all(job.result(30).is_complete for job in jobs)
    assert most[0] <= limit
    budgets = {id(pool._budget) for pool in pools}
    assert len(budgets) == 1
    other = open_pool(GuardedStore(store, is_set_up=True, transport=transport, queue_owner=partial(object)))
    assert id(other._budget) not in budgets
    for pool in [*pools, other]:
        pool.close()


# Closing


def test_close_keeps_its_time_while_a_registration_hangs(store: MemoryStore, engine: ToyEngine) -> None:
    gate = Gate()
    store.faults.add(Fault(call="register", before=gate.hold))
    pool = open_pool(store)
    registering = started(lambda: engine.register(pool))
    gate.wait_until_reached()
    with pytest.raises(StoreError, match=r"not closed: register_kv_caches\(\) still runs after 0.05 s"):
        pool.close(timeout=0.05)
    gate.open()
    registering.join()
    pool.close()


def test_close_in_the_callback_of_a_lookup_unregisters_and_ends(
    store: MemoryStore, engine: ToyEngine, log: list[Call]
) -> None:
    for timeout in (0.0, 60.0):  # of a lookup that is late, and of one that is answered
        pool, closed = open_pool(store), threading.Event()
        engine.register(pool)
        gate = Gate()
        store.faults.add(Fault(call="exists", before=gate.hold))

        def close(_: Future[int], pool: KVPool = pool, closed: threading.Event = closed) -> None:
            pool.close(30.0)
            closed.set()

        pool.lookup_async(33, prompt(f"callback {timeout}", 2), timeout).add_done_callback(close)
        gate.open()
        assert closed.wait(20), "close() waited for the thread that it ran in"
        assert num_registered(log) == 0


def test_closes_in_a_callback_and_elsewhere_do_not_wait_for_each_other(
    store: MemoryStore, engine: ToyEngine, log: list[Call]
) -> None:
    pool, in_callback, closing, errors = open_pool(store), Gate(), Gate(), []
    engine.register(pool)

    def close(_: Future[SaveResult]) -> None:
        in_callback.hold()
        try:
            pool.close(30.0)
        except BaseException as error:
            errors.append(error)
            raise

    hashes, put_gate = prompt("elsewhere", 1), Gate()
    store.faults.add(Fault(call="put", before=put_gate.hold))
    job = pool.save(to_save(hashes, [[1]], 16))
    job.add_done_callback(close)
    put_gate.open()
    in_callback.wait_until_reached()
    end = pool._close

    def held(start: float, timeout: float) -> None:
        closing.hold()
        end(start, timeout)

    pool._close = held  # type: ignore[method-assign]
    other = started(partial(pool.close, 30.0))
    closing.wait_until_reached()
    in_callback.open()
    closing.open()
    other.join(20)
    assert not other.is_alive()
    assert not errors
    assert num_registered(log) == 0
    assert job.result(0).is_complete
