"""Wrong output without a word: each way in which the pool could once report success on bytes that are not right."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from mooncrate import CacheGroup, KVPool, PoolLimits
from mooncrate.data import BlobBlockHashes, LoadSpec, ReqMeta, RequestTracker, chunk_hashes_for_block_size
from mooncrate.errors import LayoutError
from mooncrate.kv_caches import describe_kv_caches
from mooncrate.memory_store import MemoryStore
from mooncrate.store_faults import Fault, Gate
from toy_engine import ToyEngine, Waiting, prompt, to_load, to_save

FULL = CacheGroup.full_attention(16)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([FULL])


@pytest.fixture
def pool(store: MemoryStore, engine: ToyEngine) -> Iterator[KVPool]:
    with open_pool(store, engine) as opened:
        yield opened


def open_pool(store: MemoryStore, engine: ToyEngine, **options: Any) -> KVPool:  # noqa: ANN401 - those of open
    opened = KVPool.open(model_name="m", groups=engine.groups, store=store, **options)
    engine.register(opened)
    return opened


def overwritable(hashes: Sequence[bytes], form: str) -> tuple[Any, Callable[[Sequence[bytes]], None]]:
    """Hashes in one of the forms that an engine may reuse, and what reuses them."""
    width = len(hashes[0])
    blob, items = bytearray(b"".join(hashes)), list(hashes)

    def reuse(others: Sequence[bytes]) -> None:
        items[:], blob[:] = others, b"".join(others)
        halves[:] = [half for one in others for half in (b"half", one)]

    view = BlobBlockHashes(blob, width)
    halves = [half for one in hashes for half in (b"half", one)]
    forms: dict[str, Any] = {
        "list": items,
        "list of views": view[:],
        "tuple of views": tuple(view),
        "blob": view,
        "blob of a view that cannot be written": BlobBlockHashes(memoryview(blob).toreadonly(), width),
        "chunk view of views": chunk_hashes_for_block_size([v for one in view for v in (b"half", one)], 8, 16),
        "chunk view": chunk_hashes_for_block_size(halves, 8, 16),
    }
    return forms[form], reuse


FORMS = [
    "list", "list of views", "tuple of views", "blob", "blob of a view that cannot be written", "chunk view",
    "chunk view of views",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_hashes_that_are_reused_do_not_rename_a_queued_save(pool: KVPool, engine: ToyEngine, form: str) -> None:
    hashes, others, event = prompt("reused", 2), prompt("another request", 2), Waiting()
    engine.compute(hashes, [[1, 2]])
    blocker = pool.save(to_save(prompt("blocker", 1), [[9]], 16), event=event)
    event.gate.wait_until_reached()
    given, reuse = overwritable(hashes, form)
    job = pool.save(to_save(given, [[1, 2]], 32))
    reuse(others)
    event.gate.open()
    blocker.result()
    assert job.result().is_complete
    assert [pool.lookup(33, hashes), pool.lookup(33, others)] == [32, 0]
    assert engine_loads(pool, engine, hashes)


def engine_loads(pool: KVPool, engine: ToyEngine, hashes: Sequence[bytes]) -> bool:
    """Loads a prompt of two blocks and compares it."""
    assert pool.load(to_load(hashes, [[20, 21]], 32)).result().is_complete
    return all(engine.holds(hashes, [[20, 21]], 0, chunk) for chunk in range(2))


@pytest.mark.parametrize("form", FORMS)
def test_hashes_that_are_reused_do_not_change_a_lookup_on_its_way(store: MemoryStore, form: str) -> None:
    engine = ToyEngine([FULL])
    present, absent, gate = prompt("present", 2), prompt("absent", 2), Gate()
    with open_pool(store, engine, limits=PoolLimits(num_lookup_threads=1)) as pool:
        engine.compute(present, [[1, 2]])
        assert pool.save(to_save(present, [[1, 2]], 32)).result().is_complete
        store.faults.add(Fault(call="exists", before=gate.hold))
        blocker = pool.lookup_async(33, prompt("blocker", 2), timeout=60.0)
        gate.wait_until_reached()
        given, reuse = overwritable(absent, form)
        first = pool.lookup_async(33, given, timeout=60.0)
        second = pool.lookup_async(33, list(absent), timeout=60.0)
        reuse(present)
        gate.open()
        assert (blocker.result(), first.result(), second.result()) == (0, 0, 0)


def test_lookups_under_other_keys_are_never_shared(store: MemoryStore) -> None:
    engine = ToyEngine([FULL])
    with open_pool(store, engine) as pool:
        seen = []
        for _ in range(5):
            seen.append(pool._lookup_groups[0])
            engine.register(pool)
        assert len(set(seen)) == 5


@pytest.mark.parametrize("num_hashes", [0, 1, 3])
def test_too_few_hashes_are_never_a_success(pool: KVPool, engine: ToyEngine, num_hashes: int) -> None:
    hashes = prompt("few", 4)
    engine.compute(hashes, [[1, 2, 3, 4]])
    pool.save(to_save(hashes, [[1, 2, 3, 4]], 64)).result()
    tracker = RequestTracker("request", 64, ([5, 6, 7, 8],))
    meta = ReqMeta.from_request_tracker(tracker, 16, LoadSpec(0, 64, can_load=True), block_hashes=hashes[:num_hashes])
    assert meta is not None
    with pytest.raises(LayoutError, match=f"has {num_hashes} hashes of 16 tokens for 64 tokens"):
        pool.load(meta).result()
    with pytest.raises(LayoutError, match=f"has {num_hashes} hashes of 16 tokens for 64 tokens"):
        pool.save(to_save(hashes[:num_hashes], [[1, 2, 3, 4]], 64)).result()
    assert all(engine.is_empty(0, block_id) for block_id in (5, 6, 7, 8))


@pytest.mark.parametrize("block_ids", [[0, 2, 3], [1, 0, 3], [1, 2, 0], [0, 0, 0]])
def test_a_null_block_of_full_attention_is_never_complete(
    pool: KVPool, engine: ToyEngine, block_ids: list[int]
) -> None:
    hashes = prompt("null", 3)
    engine.compute(hashes, [block_ids])
    assert not pool.save(to_save(hashes, [block_ids], 48)).result().is_complete
    engine.compute(hashes, [[4, 5, 6]])
    assert pool.save(to_save(hashes, [[4, 5, 6]], 48)).result().is_complete
    result = pool.load(to_load(hashes, [block_ids], 48)).result()
    assert (result.is_complete, result.num_null_blocks) == (False, block_ids.count(0))
    assert result.num_tokens == 16 * block_ids.index(0)


@pytest.mark.parametrize(("table", "block_id"), [([1, 2, 1], 1), ([3, 3, 3], 3), ([0, 5, 5], 5)])
def test_a_block_for_two_chunks_is_refused(
    pool: KVPool, engine: ToyEngine, store: MemoryStore, table: list[int], block_id: int
) -> None:
    hashes = prompt("twice", 3)
    message = rf"block {block_id} {table.count(block_id)} times in the block table of group 0"
    with pytest.raises(LayoutError, match=message):
        pool.save(to_save(hashes, [table], 48)).result()
    assert not store.pool.keys()
    engine.compute(hashes, [[7, 8, 9]])
    pool.save(to_save(hashes, [[7, 8, 9]], 48)).result()
    with pytest.raises(LayoutError, match=message):
        pool.load(to_load(hashes, [table], 48)).result()
    assert engine.is_empty(0, block_id)


def test_null_blocks_before_a_window_are_no_hole(store: MemoryStore) -> None:
    engine = ToyEngine([FULL, CacheGroup.sliding_window(16, 17)])
    hashes = prompt("window", 3)
    with open_pool(store, engine) as pool:
        engine.compute(hashes, [[1, 2, 3], [0, 0, 6]])
        result = pool.save(to_save(hashes, [[1, 2, 3], [0, 0, 6]], 48)).result()
        assert (result.is_complete, result.num_null_blocks, result.num_saved) == (True, 2, 4)


@pytest.mark.parametrize("tail", [CacheGroup.sliding_window(16, 8), CacheGroup.recurrent(16)])
@pytest.mark.parametrize(("num_cached", "num_tokens"), [(40, 0), (32, 32), (48, 48), (0, 32)])
def test_a_prefix_that_lost_its_end_is_not_shortened_to_one_whose_tail_nobody_holds(
    store: MemoryStore, tail: CacheGroup, num_cached: int, num_tokens: int
) -> None:
    """The engine holds 40 tokens, of the tail group chunk 2 only; chunk 2 of full attention is gone from the pool."""
    engine = ToyEngine([FULL, tail])
    hashes = prompt("tail", 4)
    with open_pool(store, engine) as pool:
        engine.compute(hashes, [[1, 2, 3, 4], [5, 6, 7, 8]])
        assert pool.save(to_save(hashes, [[1, 2, 3, 4], [5, 6, 7, 8]], 64)).result().is_complete
        store.pool.drop([f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{hashes[2].hex()}"])
        result = pool.load(to_load(hashes, [[9, 10, 11, 12], [0, 0, 13, 14]], 64, num_cached)).result()
        # From nothing, 32 tokens of full attention arrive, but the tail was loaded for 64 only.
        expected = {0: 0, 48: 64}.get(num_cached, num_tokens)
        assert result.num_tokens == expected


def test_kernel_blocks_are_not_guessed_from_another_dimension_of_the_same_size() -> None:
    tensor = torch.zeros(32, 16, 8)  # 16 blocks of two kernel blocks of 16 tokens
    with pytest.raises(LayoutError, match=r"dimension 1 .* dimension 0 of size 32.*say block_dim="):
        describe_kv_caches({"layer": tensor}, 16)
    layout = describe_kv_caches({"layer": tensor}, 16, block_dim=0)
    assert [(stride, num_bytes) for _, stride, num_bytes in layout.regions] == [(1024, 1024)]
