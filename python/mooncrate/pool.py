"""The pool as an engine sees it: register its KV cache once, then look up, load and save requests.

>>> import torch
>>> from mooncrate import CacheGroup, KVPool
>>> from mooncrate.data import ReqMeta
>>> from mooncrate.memory_store import MemoryStore
>>> cache = {"layer": torch.arange(8 * 64, dtype=torch.int32).view(8, 64)}  # 8 blocks of 256 bytes
>>> hashes = [bytes([number]) * 32 for number in range(3)]  # of 48 tokens; your engine chains them
>>> with KVPool.open(model_name="m", groups=[CacheGroup.full_attention(16)], store=MemoryStore()) as pool:
...     pool.register_kv_caches(cache, num_blocks=8)
...     job = pool.save(ReqMeta("request", 48, ([5, 2, 7],), hashes))
...     (job.result().num_saved, job.result().num_bytes, pool.lookup(49, hashes))
(3, 768, 48)
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from mooncrate._core import LookupPlan
from mooncrate.config import CONFIG_PATH_VARIABLE, StoreConfig, StoreConnection
from mooncrate.errors import LayoutError, StoreError
from mooncrate.groups import RankTopology, check_integer
from mooncrate.jobs import Job, Result, Workers, seconds_until, settle
from mooncrate.keyspace import KeySpace
from mooncrate.kv_caches import describe_kv_cache_groups, register
from mooncrate.lookups import Lookups
from mooncrate.metrics import Count, PoolMetrics, Recorder
from mooncrate.pacing import AddressBudget, Backoff, PoolLimits
from mooncrate.results import LoadResult, SaveResult, SkipReason
from mooncrate.store import GuardedStore, Store, borrow, describe
from mooncrate.transfers import Channel, Request, check_devices, check_regions, registered_groups, snapshot
from mooncrate.workers import LoadWorker, SaveWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch import Tensor

    from mooncrate.groups import CacheGroup
    from mooncrate.kv_caches import Registration
    from mooncrate.namespace import Namespace
    from mooncrate.requests import ReqMeta
    from mooncrate.transfers import ChunkMask, DeviceEvent

    KVCaches = Mapping[str, Tensor | Sequence[Tensor]]

logger = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 30.0
SINGLE_RANK: Final = RankTopology()
DEFAULT_LIMITS: Final = PoolLimits()


class KVPool:
    """Saves, finds and loads the KV cache of one engine worker. Made by `open`. Safe to use from many threads.

    The blocks of a save or a load belong to it until its future is done: do not write them, nor give them to another
    request. To take them back early, as for a preemption, cancel the future: if that says False the job runs, and
    waiting for it is all that is left.
    """

    def __init__(
        self,
        store: GuardedStore,
        keys: KeySpace,
        *,
        connection: StoreConnection | None = None,
        null_block_id: int | None = 0,
        put_config: object = None,
        limits: PoolLimits = DEFAULT_LIMITS,
    ) -> None:
        """Use `open`."""
        self._store = store
        self._connection = connection
        self._null_block_id = null_block_id
        self._put_config = put_config
        self._limits = limits
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close while its own thread holds it
        self._is_closed = False
        self._is_done = False
        self._closing = threading.Condition()  # on an RLock, for the same reason
        self._closer: threading.Thread | None = None
        self._stop = threading.Event()
        self._opened_keys = keys
        self._keys = keys
        # With a number that is never used again: lookups are equal only under the same keys.
        self._lookup_groups = (0, None if keys.missing() else keys.lookup_groups())
        self._registration: Registration | None = None
        self._kv_caches: Sequence[KVCaches] = ()  # keeps their memory alive while the store knows it
        self._channel: Channel | None = None
        self._retired = threading.Event()  # set when the channel's memory is about to be unregistered
        self._recorder = Recorder()
        if limits.max_addrs_in_flight is None:
            self._budget = AddressBudget.of(store.queue_owner, store.transport.max_addrs_in_flight)
        else:
            self._budget = AddressBudget(limits.max_addrs_in_flight)
        self._backoff = Backoff(limits.first_pause_seconds, limits.max_pause_seconds)
        self._savers: Workers[SaveResult] = Workers(
            "save", limits.num_save_threads, limits.max_queued_saves, partial(self._note_end, Count.SAVES_FAILED)
        )
        self._loaders: Workers[LoadResult] = Workers(
            "load", limits.num_load_threads, limits.max_queued_loads, partial(self._note_end, Count.LOADS_FAILED)
        )
        self._lookups = Lookups(
            store.batch_is_exist,
            self._recorder,
            limits.num_lookup_threads,
            limits.max_stuck_lookups,
            limits.max_keys_per_exists,
        )

    @classmethod
    def open(
        cls,
        config: StoreConfig | None = None,
        *,
        model_name: str,
        groups: Sequence[CacheGroup],
        hash_block_size: int | None = None,
        topology: RankTopology = SINGLE_RANK,
        cache_prefix: str = "",
        namespace: Namespace | None = None,
        store: Store | None = None,
        null_block_id: int | None = 0,
        put_config: object = None,
        limits: PoolLimits = DEFAULT_LIMITS,
    ) -> Self:
        """Connects to a pool.

        Args:
            config: Where it is. If neither this nor ``store`` is given: what ``MOONCAKE_CONFIG_PATH`` names if that is
                set, else a pool of this process's own, which ends with it.
            model_name: Part of every key.
            groups: The KV cache groups; their order is their number in the keys.
            hash_block_size: Tokens per block hash; the greatest common divisor of all block sizes if not given.
            topology: Where this worker stands among the ranks of its engine.
            cache_prefix: In front of every key, so that deployments can share a pool; left out when empty.
            namespace: Builds a fingerprint of all that decides what bytes mean into the keys. Without it they are the
                plain ones, those of vLLM.
            store: Any object that has the store's calls, set up. It stays the caller's, who closes it after the pool.
            null_block_id: The block of an engine that holds nothing: never saved, never loaded. None if it has none.
            put_config: Goes with every put, like the one that `mooncrate.mooncake.replicate_config` makes.
            limits: Sizes of batches, queues and pauses.

        Raises:
            LayoutError: Groups, ranks, sizes or namespace contradict each other.
            ConfigError: The configuration cannot be meant.
            StoreError: The store cannot be reached, or both ``config`` and ``store`` are given.
        """
        if config is not None and store is not None:
            raise StoreError("both config and store are given: a pool has one store")
        if null_block_id is not None:
            check_integer("null_block_id", null_block_id, least=0)
        if hash_block_size is None:
            hash_block_size = math.gcd(*(group.block_size for group in groups)) or 1
        keys = KeySpace(model_name, tuple(groups), topology, hash_block_size, cache_prefix, namespace)
        logger.info("%s", keys.describe())
        if store is not None:
            return cls(borrow(store), keys, null_block_id=null_block_id, put_config=put_config, limits=limits)
        connection = _connect(config)
        try:
            return cls(
                connection.store,
                keys,
                connection=connection,
                null_block_id=null_block_id,
                put_config=put_config,
                limits=limits,
            )
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Self:
        """Returns the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the pool."""
        self.close()

    def __repr__(self) -> str:
        """Names model, groups and state."""
        state = "closed" if self._is_closed else "registered" if self._channel is not None else "open"
        return f"<KVPool {self._keys.model_name!r}, {len(self._keys.groups)} groups, {state}>"

    @property
    def namespace(self) -> Namespace | None:
        """The namespace as far as it is known: after registration what a pool that only looks up has to be given."""
        return self._keys.namespace

    def register_kv_caches(
        self,
        kv_caches: KVCaches | Sequence[KVCaches],
        num_blocks: int,
        *,
        block_dim: int | Mapping[str, int] | None = None,
    ) -> None:
        """Tells where the KV cache lies. Again: the new one takes the place of the old one.

        Args:
            kv_caches: Tensors by layer, a list of them where a layer has several; for several groups one mapping each.
            num_blocks: Blocks in every tensor. Block ids of requests are checked against it.
            block_dim: The dimension of the tensors that counts blocks, for all or by layer, where it cannot be told.

        Raises:
            LayoutError: Tensors that `mooncrate.kv_caches.describe_kv_caches` refuses, another number of groups, a
                chunk of more regions than the transport takes, or a namespace that says something else.
            StoreError: The store refuses the memory, cannot move it, or jobs on memory registered before still run.
        """
        layers = [kv_caches] if isinstance(kv_caches, Mapping) else list(kv_caches)
        with self._lock:
            self._check("register_kv_caches")
            if len(layers) != len(self._keys.groups):
                raise LayoutError(f"KV caches of {len(layers)} groups for a pool of {len(self._keys.groups)} groups")
            layout = describe_kv_cache_groups(layers, num_blocks, block_dim=block_dim)
            check_regions(layout, self._budget.limit)
            if self._connection is not None and not self._store.transport.has_device_memory:
                check_devices(layers)
            keys = self._opened_keys
            if keys.namespace is not None:
                keys = replace(keys, namespace=keys.namespace.with_layout(layout))
            with self._savers.held() as num_saves, self._loaders.held() as num_loads:
                if num_jobs := num_saves + num_loads:
                    raise StoreError(f"{num_jobs} jobs on the memory registered before still run: wait for them first")
                self._retired.set()  # a job that was just about to be queued does nothing
            self._channel = None
            self._unregister()
            self._registration = register(self._store, layout.storages)
            self._kv_caches = layers
            self._retired = retired = threading.Event()
            self._channel = Channel(
                self._store,
                registered_groups(keys, layout, num_blocks),
                self._null_block_id,
                keys.unit,
                self._limits,
                self._budget,
                self._recorder,
                lambda: self._stop.is_set() or retired.is_set(),
                self._put_config,
            )
            if keys != self._keys:
                logger.info("%s", keys.describe())
            self._keys, self._lookup_groups = keys, (self._lookup_groups[0] + 1, keys.lookup_groups())

    def lookup(
        self, num_tokens: int, block_hashes: Sequence[bytes | memoryview], timeout: float = LOOKUP_SECONDS
    ) -> int:
        """Returns how many tokens of a prompt the pool can give: `lookup_async`, and the wait for it."""
        return self.lookup_async(num_tokens, block_hashes, timeout).result()

    def lookup_async(
        self, num_tokens: int, block_hashes: Sequence[bytes | memoryview], timeout: float = LOOKUP_SECONDS
    ) -> Future[int]:
        """Finds out how many tokens of a prompt the pool can give, in the background.

        Args:
            num_tokens: Tokens of the prompt. The last one is never found, as the engine has to compute something.
            block_hashes: One per ``hash_block_size`` tokens, chained: each names the whole prefix up to its end. Equal
                lookups that are on their way at the same time are asked once.
            timeout: Seconds after which the answer is 0.

        Returns:
            A future that ends in time, and with 0 where anything fails: no caller waits for a store that does not
            answer. The number is a multiple of every group's block size.

        Raises:
            LayoutError: The request contradicts itself, or the keys are not known: the message names the fields of the
                namespace that are missing.
            StoreError: The pool is closed, or belongs to another process.
        """
        self._check("lookup")
        if not timeout >= 0:
            raise LayoutError(f"timeout is {timeout}, less than 0 seconds")
        generation, groups = self._lookup_groups
        if groups is None:
            raise LayoutError(
                f"the namespace does not say {', '.join(self._keys.missing())}, so the keys are not known: register "
                "the KV caches first, or give these fields to Namespace(...)"
            )
        hashes = snapshot(block_hashes)
        plan = LookupPlan(num_tokens, hashes, groups, self._keys.hash_block_size)
        num_hashes = min(len(hashes), num_tokens // self._keys.hash_block_size)
        if num_hashes < 1:
            self._recorder.add(Count.LOOKUPS)
            return _ended(0)
        key = (generation, num_tokens, num_hashes, bytes(hashes[0]), bytes(hashes[num_hashes - 1]))
        return self._lookups.ask(key, plan, timeout)

    def save(
        self,
        req: ReqMeta,
        *,
        event: DeviceEvent | None = None,
        num_saved_tokens: int = 0,
        lists_saved: bool = False,
        chunk_mask: ChunkMask | None = None,
    ) -> Future[SaveResult]:
        """Saves the first ``token_len_chunk`` tokens of a request, as far as the pool does not have them.

        Never blocks. What the pool has is found out anew each time, so a later save of the same request fills what an
        earlier one could not.

        Args:
            req: The request. What is needed of it is copied.
            event: To be waited for, like ``req.current_event``, before blocks are read.
            num_saved_tokens: Tokens from the start that the pool has for certain, so that chunks that end there are
                left alone. Take it from a lookup, or from a save of the same request that was complete.
            lists_saved: Whether the result has ``saved_chunks``, which costs an object for each.
            chunk_mask: Says which chunks are worth saving, for engines that keep some ends of a sliding window only. Is
                called once per group, in the thread of the job.

        Returns:
            A future of what became of it. It ends with an exception only when the request contradicts itself, an event
            fails, or a close could not wait any longer.

        Raises:
            LayoutError: ``num_saved_tokens`` cannot be.
            StoreError: The pool is closed, broken, not registered, or belongs to another process.
        """
        channel = self._registered("save")
        check_integer("num_saved_tokens", num_saved_tokens, least=0)
        if req.can_save is False:
            return _ended(SaveResult(skipped=SkipReason.NOT_WANTED))
        request = Request.of(req, event, req.token_len_chunk, num_saved_tokens, lists_saved, chunk_mask)
        job = Job(f"the save of request {req.req_id}", partial(SaveWorker(channel, self._backoff).save, request))
        if not self._savers.offer(job):
            self._recorder.add(Count.SAVES_REFUSED)
            return _ended(SaveResult(skipped=SkipReason.QUEUE_FULL))
        return job.future

    def load(self, req: ReqMeta, *, event: DeviceEvent | None = None) -> Future[LoadResult]:
        """Loads what a request's ``load_spec`` says: what the pool holds beyond what the engine holds.

        Waits while more loads are queued than the queue holds. Of a group with a sliding window or a recurrent state
        only the blocks at the end are loaded, which is all that a prefix of that length needs.

        Args:
            req: The request. What is needed of it is copied.
            event: To be waited for, like ``req.current_event``, before blocks are written.

        Returns:
            A future of what became of it. It ends with an exception as that of `save` does; then no block may be used.

        Raises:
            LayoutError: Nothing to load was said, or something that cannot be.
            StoreError: The pool is closed, broken, not registered, or belongs to another process.
        """
        channel = self._registered("load")
        spec = req.load_spec
        if spec is None or not spec.can_load:
            raise LayoutError(f"request {req.req_id} has nothing to load: its load_spec is {spec}")
        for name in ("kvpool_cached_tokens", "vllm_cached_tokens"):
            check_integer(name, getattr(spec, name), least=0)
        size = self._keys.hash_block_size
        if spec.kvpool_cached_tokens % size:
            raise LayoutError(
                f"kvpool_cached_tokens {spec.kvpool_cached_tokens} is not a whole number of {size}-token hashes"
            )
        request = Request.of(req, event, spec.kvpool_cached_tokens, spec.vllm_cached_tokens)
        job = Job(f"the load of request {req.req_id}", partial(LoadWorker(channel).load, request))
        self._loaders.put(job)
        return job.future

    def reset(self) -> int:
        """Removes everything under this pool's keys, of all ranks, from the store; other keys stay.

        Returns:
            How many objects went.

        Raises:
            LayoutError: The keys are not known, as in `lookup_async`.
            StoreError: The store refused, or the pool is closed or belongs to another process.
        """
        self._check("reset")
        if missing := self._keys.missing():
            raise LayoutError(f"the namespace does not say {', '.join(missing)}, so the keys are not known")
        num_removed = 0
        for pattern in self._keys.removal_patterns():
            answer = self._store.remove_by_regex(pattern, force=True)
            if answer < 0:
                raise StoreError(f"remove_by_regex answered {describe(answer)}; {num_removed} objects went before it")
            num_removed += answer
        return num_removed

    def metrics(self) -> PoolMetrics:
        """Returns what the pool has done so far. Works whatever state the pool is in, and never raises."""
        depths = {
            "save": self._savers.num_queued,
            "load": self._loaders.num_queued,
            "lookup": self._lookups.num_queued,
        }
        return self._recorder.snapshot(depths)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Ends the pool: lets jobs finish, then stops what is left, unregisters, and disconnects. Idempotent.

        New calls are refused at once, and lookups on their way are 0. For half of the time queued jobs go on; after
        that, jobs end before their next call to the store: saves are skipped, loads report what they did not fetch. In
        a forked child this does nothing.

        Args:
            timeout: Seconds for all of it.

        Raises:
            StoreError: A call still hangs in the store. Its job has ended with this error too; as long as the process
                lives the store may still use the job's blocks. `close` may be tried again.
        """
        if os.getpid() != self._pid:
            return
        start = time.monotonic()
        self._is_closed = True
        self._lookups.close(start)
        for workers in (self._savers, self._loaders):
            workers.close()
        if not self._is_closer(start + timeout):
            return
        try:
            # Another thread may hold it for as long as a registration hangs in the store.
            if not self._lock.acquire(timeout=seconds_until(start + timeout)):
                raise StoreError(f"not closed: register_kv_caches() still runs after {timeout:g} s")
            try:
                self._close(start, timeout)
            finally:
                self._lock.release()
        finally:
            with self._closing:
                self._closer = None
                self._closing.notify_all()

    def _is_closer(self, deadline: float) -> bool:
        """Tells whether this call has to close the pool: one does it, others wait for that one."""
        current = threading.current_thread()
        with self._closing:
            while self._closer not in (None, current):  # the same thread comes again from a signal handler
                if self._savers.has_thread(current) or self._loaders.has_thread(current):
                    return False  # a callback of a job, for whose thread the other waits
                if not self._closing.wait(seconds_until(deadline)):
                    raise StoreError("not closed: close() still runs in another thread")
            if self._is_done:
                return False
            self._closer = current
            return True

    def _close(self, start: float, timeout: float) -> None:
        """Lets jobs end, and ends what they used."""
        is_drained = self._join(start + timeout / 2)
        self._stop.set()
        self._budget.wake()
        deadline = start + timeout
        is_drained = is_drained or self._join(deadline)
        hanging = StoreError(f"the pool was closed, but a call hangs in the store after {timeout:g} s")
        for workers in (self._savers, self._loaders):
            workers.abandon(hanging)
        self._lookups.close(deadline)
        if is_drained:
            self._unregister()
        self._channel = None
        left = seconds_until(deadline)
        if self._connection is not None:
            self._connection.close(left)
        else:
            self._store.close(left)
        self._kv_caches = ()
        self._is_done = True

    def _join(self, deadline: float) -> bool:
        """Waits for the threads of jobs; returns whether all have ended."""
        are_saved = self._savers.join(deadline)
        return self._loaders.join(deadline) and are_saved

    def _check(self, name: str) -> None:
        """Refuses calls that must not reach the store."""
        if (pid := os.getpid()) != self._pid:
            raise StoreError(
                f"{name} was called in process {pid}, forked from process {self._pid} that the pool belongs to: open a "
                "pool in the child, after the fork"
            )
        if self._is_closed:
            raise StoreError(f"{name} was called after close(): open a new pool")

    def _registered(self, name: str) -> Channel:
        self._check(name)
        channel = self._channel
        if channel is None:
            raise StoreError(f"{name} was called before register_kv_caches(): the pool does not know where blocks lie")
        return channel

    def _unregister(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            try:
                registration.unregister()
            except StoreError as error:  # nothing is lost: the memory is not used through the store any more
                logger.warning("unregistering failed: %s", error)

    def _note_end(self, failed: Count, future: Future[Any], error: BaseException | None) -> None:
        if future.cancelled():
            self._recorder.add(Count.JOBS_CANCELLED)
        elif error is not None:
            self._recorder.add(failed)


def _connect(config: StoreConfig | None) -> StoreConnection:
    if config is None:
        config = StoreConfig.from_env() if os.environ.get(CONFIG_PATH_VARIABLE) else StoreConfig.embedded()
    return config.connect()


def _ended(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    settle(future, result)
    return future
