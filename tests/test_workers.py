"""Threads that run jobs, the budget of addresses, and lookups with deadlines: each by itself, without a store."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

import pytest

from mooncrate import CacheGroup, LookupPlan, PoolLimits
from mooncrate.errors import LayoutError, StoreError
from mooncrate.jobs import Job, Workers, settle
from mooncrate.lookups import Lookups
from mooncrate.metrics import Recorder
from mooncrate.pacing import AddressBudget
from mooncrate.store_faults import Gate
from toy_engine import prompt

NO_QUEUES = {"save": 0, "load": 0, "lookup": 0}


def never() -> bool:
    return False


# Jobs


def test_a_future_ends_once() -> None:
    future: Future[int] = Future()
    assert settle(future, 1)
    assert not settle(future, 2)
    assert not settle(future, error=ValueError())
    assert future.result() == 1
    cancelled: Future[int] = Future()
    cancelled.cancel()
    assert not settle(cancelled, 1)


def test_jobs_run_in_order_and_know_nothing_of_each_other() -> None:
    workers: Workers[int] = Workers("save", 1, 10)
    order: list[int] = []

    def work(number: int) -> int:
        order.append(number)
        if number % 3 == 1:
            raise ValueError(number)
        return number

    jobs = [Job("same name", partial(work, number)) for number in range(9)]
    assert all(workers.offer(job) for job in jobs)
    assert len({job.job_id for job in jobs}) == 9
    errors = [job.future.exception(30) for job in jobs]
    assert [isinstance(error, ValueError) for error in errors] == [number % 3 == 1 for number in range(9)]
    assert order == list(range(9))
    assert all(error is None or error.__traceback__ is not None for error in errors)
    workers.close()
    assert workers.join(float("inf"))


def test_rule_19_jobs_end_once_whoever_cancels_or_abandons_them() -> None:
    ended: list[Future[int]] = []
    workers: Workers[int] = Workers("save", 2, 100, lambda future, _: ended.append(future))
    gate = Gate()

    def hold() -> int:
        gate.hold()
        return 1

    running = [Job("running", hold) for _ in range(2)]
    waiting = [Job("waiting", lambda: 2) for _ in range(5)]
    for job in running + waiting:
        assert workers.offer(job)
    gate.wait_until_reached(2)
    assert waiting[0].future.cancel()
    assert not running[0].future.cancel()
    assert workers.abandon(StoreError("abandoned")) == 7
    gate.open()
    workers.close()
    assert workers.join(float("inf"))
    assert len(ended) == len(set(ended)) == 7
    for job in running + waiting[1:]:
        with pytest.raises(StoreError, match="abandoned"):
            job.future.result(0)
    with pytest.raises(CancelledError):
        waiting[0].future.result(0)
    assert workers.num_unfinished == 0


def test_a_callback_that_fails_stops_no_job() -> None:
    def fail(*_: object) -> None:
        raise ValueError

    workers: Workers[int] = Workers("save", 1, 10, fail)
    for number in range(3):
        job = Job("job", partial(int, number))
        workers.offer(job)
        assert job.future.result(30) == number
    workers.close()
    with pytest.raises(StoreError, match=r"after close\(\)"):
        workers.offer(job)


def test_a_job_is_counted_before_anybody_hears_of_its_end() -> None:
    gate, counted = Gate(), [0]

    def count(future: Future[int], error: BaseException | None) -> None:
        gate.hold()
        assert not future.done()
        counted[0] += isinstance(error, ZeroDivisionError)

    workers: Workers[int] = Workers("save", 1, 10, count)
    job = Job("job", lambda: 1 // 0)
    workers.offer(job)
    gate.wait_until_reached()
    assert not job.future.done()
    gate.open()
    assert isinstance(job.future.exception(30), ZeroDivisionError)
    assert counted == [1]
    workers.close()


# The budget of addresses


def test_a_budget_serves_in_order_so_that_nobody_starves() -> None:
    budget, order, lock = AddressBudget(10), [], threading.Lock()
    threads, is_waiting = [], threading.Semaphore(0)

    def about_to_wait() -> bool:
        is_waiting.release()
        return False

    def take(number: int, num_addrs: int) -> None:
        with budget.taken(num_addrs, about_to_wait) as is_taken, lock:
            assert is_taken
            order.append(number)

    with budget.taken(6, never):
        for number, num_addrs in enumerate((10, 1, 1)):  # the small ones would fit, but came later
            thread = threading.Thread(target=take, args=(number, num_addrs))
            thread.start()
            threads.append(thread)
            assert is_waiting.acquire(timeout=30)
        assert not order
    for thread in threads:
        thread.join()
    assert order[0] == 0
    assert budget.most_in_flight == 10


def test_a_budget_lets_go_of_who_is_stopped() -> None:
    budget, stop, answers = AddressBudget(4), threading.Event(), []

    def take() -> None:
        with budget.taken(4, stop.is_set) as is_taken:
            answers.append(is_taken)

    with budget.taken(1, never):
        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        stop.set()
        budget.wake()
        for thread in threads:
            thread.join()
    assert answers == [False] * 3
    with budget.taken(4, never) as is_taken:
        assert is_taken
    with (
        pytest.raises(LayoutError, match="5 addresses in one batch, but the transport takes 4"),
        budget.taken(5, never),
    ):
        pass
    with AddressBudget(None).taken(10**9, never) as is_taken:
        assert is_taken


@pytest.mark.parametrize(
    "values",
    [
        {"max_batch_integers": 1},
        {"max_batch_bytes": 0},
        {"num_save_threads": True},
        {"max_addrs_in_flight": 0},
        {"first_pause_seconds": -0.1},
        {"first_pause_seconds": 6.0},
        {"max_pause_seconds": float("inf")},
        {"first_pause_seconds": float("nan")},
    ],
)
def test_limits_that_cannot_be_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(LayoutError):
        PoolLimits(**values)  # type: ignore[arg-type]


# Lookups


def make_lookups(exists: Callable[[list[str]], list[int]], num_threads: int = 1, max_stuck: int = 4) -> Lookups:
    return Lookups(exists, Recorder(), num_threads, max_stuck, max_keys=100)


def make_plan() -> LookupPlan:
    return LookupPlan(33, prompt("plan", 2), [(["prefix"], CacheGroup.full_attention(16))], 16)


def test_rule_27_every_waiter_has_a_deadline_of_its_own() -> None:
    gate = Gate()

    def exists(keys: list[str]) -> list[int]:
        gate.hold()
        return [1] * len(keys)

    lookups = make_lookups(exists)
    patient = lookups.ask("key", make_plan(), 60.0)
    hasty = lookups.ask("key", make_plan(), 0.02)
    assert hasty.result(30) == 0
    assert not patient.done()
    late_comer = lookups.ask("key", make_plan(), 60.0)  # asks anew, since the other seems to hang
    gate.wait_until_reached(2)
    gate.open()
    assert (patient.result(30), late_comer.result(30)) == (32, 32)
    counts = lookups._recorder.snapshot(NO_QUEUES).counts
    assert (counts["lookups"], counts["lookups_shared"], counts["lookups_late"]) == (3, 1, 1)
    lookups.close(float("inf"))


def test_rule_27_callbacks_and_cancellations_stop_no_lookup() -> None:
    lookups = make_lookups(lambda keys: [1] * len(keys))

    def end_the_thread(_: Future[int]) -> None:
        raise SystemExit

    for timeout in (0.0, 60.0):
        for _ in range(8):
            lookups.ask(object(), make_plan(), timeout).add_done_callback(end_the_thread) if timeout else None
            lookups.ask(object(), make_plan(), timeout).cancel()
    assert lookups.ask("key", make_plan(), 60.0).result(30) == 32
    lookups.close(float("inf"))
    with pytest.raises(StoreError, match=r"after close\(\)"):
        lookups.ask("key", make_plan(), 1.0)


def test_short_and_negative_answers_count_as_absent() -> None:
    answers = [[1], [1, -1], [], [1, 1, 1]]
    lookups = make_lookups(lambda _: answers.pop(0))
    assert [lookups.ask(number, make_plan(), 60.0).result(30) for number in range(4)] == [16, 16, 0, 32]
    lookups.close(float("inf"))


def test_a_window_goes_out_in_calls_of_bounded_size() -> None:
    calls: list[int] = []

    def exists(keys: list[str]) -> list[int]:
        calls.append(len(keys))
        return [1] * len(keys)

    lookups = make_lookups(exists)
    hashes = [number.to_bytes(4, "big") for number in range(1000)]
    plan = LookupPlan(16_001, hashes, [(["prefix"], CacheGroup.full_attention(16))], 16)
    assert lookups.ask("key", plan, 60.0).result(30) == 16_000
    assert max(calls) == 100
    assert sum(calls) == 1000
    lookups.close(float("inf"))
