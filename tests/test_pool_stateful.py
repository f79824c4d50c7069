"""An engine that starts, saves, preempts, resumes and restarts at random, on a store that fails at random.

Whatever happens: what the pool holds is right to the byte, what a load calls good is, no job is lost or ends twice, no
chunk is put that the pool has, and once nothing fails any more everything can be saved and found.
"""

from collections import Counter
from concurrent.futures import Future
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from mooncrate import CacheGroup, KVPool, PoolLimits
from mooncrate.memory_store import Call, MemoryStore
from mooncrate.store_faults import CallName, Fault
from toy_engine import EMPTY, ToyEngine, prompt, to_load, to_save

GROUPS = [CacheGroup.full_attention(16), CacheGroup.sliding_window(32, 40), CacheGroup.recurrent(32)]
LIMITS = PoolLimits(
    max_batch_integers=12, num_save_threads=1, num_load_threads=2, first_pause_seconds=0.0, max_pause_seconds=0.0
)
NUM_HASHES = 8
NUM_TOKENS = NUM_HASHES * 16
CODES = st.sampled_from([-1, -200, -600, -704, -707, -800, -900, -12345])


class Request:
    """A prompt in blocks of the engine."""

    def __init__(self, name: str, hashes: list[bytes], block_ids: list[list[int]]) -> None:
        self.name = name
        self.hashes = hashes
        self.block_ids = block_ids
        self.jobs: list[Future[Any]] = []


class PoolMachine(RuleBasedStateMachine):
    """The engine."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []
        self.store = MemoryStore(log=self.log)
        self.engine = ToyEngine(GROUPS, hash_block_size=16, num_blocks=1 + 4 * NUM_HASHES, block_bytes=24)
        self.free = [list(range(1, self.engine.num_blocks)) for _ in GROUPS]
        self.ends: Counter[int] = Counter()
        self.jobs: list[Future[Any]] = []
        self.hash_of: dict[str, bytes] = {}
        self.present: set[str] = set()
        self.num_checked = 0
        self.open()

    def open(self) -> None:
        self.pool = KVPool.open(model_name="m", groups=GROUPS, store=self.store, limits=LIMITS, hash_block_size=16)
        self.engine.register(self.pool)

    def watch(self, job: Future[Any]) -> Future[Any]:
        index = len(self.jobs)
        self.jobs.append(job)
        job.add_done_callback(lambda _: self.ends.update([index]))
        return job

    @precondition(lambda self: all(len(free) >= NUM_HASHES for free in self.free))
    @rule(target=requests, family=st.integers(0, 1), num_shared=st.integers(0, NUM_HASHES), tail=st.integers(0, 1))
    def start(self, family: int, num_shared: int, tail: int) -> Request:
        """Starts a request, loads what the pool has of it, and computes the rest."""
        name = f"family {family}"
        hashes = prompt(name, num_shared)
        hashes += prompt(f"{name} {num_shared} {tail}", NUM_HASHES - num_shared)
        self.hash_of |= {one.hex(): one for one in hashes}
        tables = []
        for group, free in zip(GROUPS, self.free, strict=True):
            num_blocks = NUM_TOKENS // group.block_size
            tables.append(free[:num_blocks])
            del free[:num_blocks]
        request = Request(name, hashes, tables)
        hit = self.pool.lookup(NUM_TOKENS + 1, hashes)
        assert hit % 32 == 0
        if hit:
            self.load(request, hit)
        self.engine.compute(hashes, tables)
        return request

    def load(self, request: Request, hit: int) -> None:
        result = self.watch(self.pool.load(to_load(request.hashes, request.block_ids, hit))).result(30)
        good = result.num_tokens
        assert good % 32 == 0
        assert good <= hit
        needed = [range(good // 16), range(max(0, (good - 39)) // 32, good // 32), range(good // 32 - 1, good // 32)]
        for group_id, chunks in enumerate(needed):
            for chunk_id in chunks if good else ():
                assert self.engine.holds(request.hashes, request.block_ids, group_id, chunk_id)
                assert request.block_ids[group_id][chunk_id] not in result.failed_block_ids[group_id]
        if result.is_complete:
            assert good == hit

    @rule(request=requests, num_tokens=st.integers(0, NUM_TOKENS))
    def save(self, request: Request, num_tokens: int) -> None:
        """Queues a save."""
        meta = to_save(request.hashes, request.block_ids, num_tokens, request.name)
        request.jobs.append(self.watch(self.pool.save(meta)))

    @rule(request=requests)
    def save_all(self, request: Request) -> None:
        """Saves all of a request, and waits."""
        self.save(request, NUM_TOKENS)
        request.jobs[-1].result(30)

    @rule(request=consumes(requests))
    def preempt(self, request: Request) -> None:
        """Takes the blocks back, and lets somebody else write them."""
        for job in request.jobs:
            if not job.cancel():
                job.result(30)
        for group_id, table in enumerate(request.block_ids):
            for tensor in self.engine.caches[group_id].values():
                tensor[table] = EMPTY
            self.free[group_id] += table

    @rule(
        call=st.sampled_from(["exists", "put", "get"]),
        code=CODES,
        index=st.integers(0, 3),
        skip=st.integers(0, 2),
        times=st.integers(1, 3),
    )
    def fail_with_a_code(self, call: CallName, code: int, index: int, skip: int, times: int) -> None:
        """Makes some later calls answer a code for one key."""
        self.store.faults.add(Fault(call=call, code=code, indices={index}, skip=skip, times=times))

    @rule(call=st.sampled_from(["exists", "put", "get"]), is_done=st.booleans(), skip=st.integers(0, 2))
    def fail_with_an_exception(self, call: CallName, is_done: bool, skip: int) -> None:
        """Makes a later call raise, before or after its work."""
        self.store.faults.add(Fault(call=call, error=ConnectionError("gone"), skip=skip, is_done=is_done))

    @rule(call=st.sampled_from(["put", "get"]), length=st.integers(0, 2))
    def fail_with_a_short_answer(self, call: CallName, length: int) -> None:
        """Makes a later call answer for fewer keys than it was asked for."""
        self.store.faults.add(Fault(call=call, truncate=length))

    @rule(numbers=st.lists(st.integers(0, 99), max_size=4))
    def evict(self, numbers: list[int]) -> None:
        """Takes objects out of the pool, as an eviction or the death of their owner does."""
        self.settle()
        self.what_the_pool_holds_is_right()
        if keys := self.store.pool.keys():
            evicted = {keys[number % len(keys)] for number in numbers}  # what is there depends on who was faster
            self.store.pool.drop(evicted)
            self.present -= evicted

    @rule()
    def heal(self) -> None:
        """Nothing fails any more."""
        self.store.faults.clear()

    @rule()
    def restart(self) -> None:
        """Closes the pool, with jobs in it, and opens another one on the same store."""
        self.pool.close()
        assert all(job.done() for job in self.jobs)
        num_calls = len(self.log)
        self.open()
        assert {call.name for call in self.log[num_calls:]} <= {"register"}

    @rule(target=requests, request=consumes(requests))
    def resume(self, request: Request) -> object:
        """Preempts a request and starts it again in other blocks, while its older jobs may still be queued."""
        self.preempt(request)
        if not all(len(free) >= NUM_HASHES for free in self.free):
            return multiple()
        tables = []
        for table, free in zip(request.block_ids, self.free, strict=True):
            tables.append(free[: len(table)])
            del free[: len(table)]
        again = Request(request.name, request.hashes, tables)
        if hit := self.pool.lookup(NUM_TOKENS + 1, again.hashes):
            self.load(again, hit)
        self.engine.compute(again.hashes, tables)
        return again

    def settle(self) -> None:
        """Waits for all jobs."""
        for job in self.jobs:
            if not job.cancelled():
                job.result(30)

    @invariant()
    def what_the_pool_holds_is_right(self) -> None:
        """Checks every byte of what was put since the last check."""
        for call in self.log[self.num_checked :]:
            self.num_checked += 1
            if call.name != "put":
                continue
            assert len(call.keys) == len(set(call.keys))
            assert not self.present & set(call.keys)  # nothing double
            self.present |= {key for key, answer in zip(call.keys, call.answers, strict=False) if answer == 0}
            for key in call.keys:
                group_id = int(key.split("@group:")[1].split("@")[0])
                try:
                    data = self.store.pool.read(key)
                except KeyError:
                    continue
                assert data == self.engine.object_bytes(self.hash_of[key.rpartition("@")[2]], group_id)

    def teardown(self) -> None:
        """Once nothing fails any more, everything can be saved and found; every job has ended once."""
        self.store.faults.clear()
        self.settle()
        hashes = prompt("the last one", NUM_HASHES)
        self.hash_of |= {one.hex(): one for one in hashes}
        tables = [list(range(1, 1 + NUM_TOKENS // group.block_size)) for group in GROUPS]
        self.engine.compute(hashes, tables)
        result = self.watch(self.pool.save(to_save(hashes, tables, NUM_TOKENS))).result(30)
        assert result.is_complete
        assert result.num_saved == 16
        assert self.pool.lookup(NUM_TOKENS + 1, hashes) == NUM_TOKENS
        self.engine.wipe()
        self.load(Request("last", hashes, tables), NUM_TOKENS)
        self.what_the_pool_holds_is_right()
        self.pool.close()
        assert self.ends == Counter(range(len(self.jobs)))
        self.store.close()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
