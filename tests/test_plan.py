"""`TransferPlan`: the seed API's answers in one call, narrowed without being made again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncrate import TransferPlan
from mooncrate.data import BlobBlockHashes, ChunkedTokenDatabase, KeyMetadata
from mooncrate.errors import AddressOverflowError, LayoutError
from mooncrate.kv_caches import Region

BASES = [0x7000_0000_0000, 2**63 + 4096, 0x1000]
BLOCK_LEN = [4096, 512]


def make_database(block_size: int = 16, hash_block_size: int | None = None) -> ChunkedTokenDatabase:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), block_size, hash_block_size)
    database.set_kv_caches_base_addr(BASES)
    database.set_block_len(BLOCK_LEN)
    return database


def make_hashes(num_hashes: int, width: int = 32) -> list[bytes]:
    return [bytes((index + byte) % 251 for byte in range(width)) for index in range(num_hashes)]


def rows(lists: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in lists]


class Recording(Sequence[bytes]):
    """Hashes that remember which of them were touched."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = hashes
        self.touched: list[int] = []

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - both forms of a sequence
        self.touched.append(index)
        return self.hashes[index]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request of up to 40 chunks with everything that selects some of them."""
    scale = draw(st.sampled_from([1, 2, 4]))
    hash_block_size = draw(st.sampled_from([1, 4, 16]))
    num_hashes = draw(st.integers(0, 40))
    token_len = hash_block_size * draw(st.integers(0, num_hashes))
    put_step = draw(st.integers(1, 4))
    return {
        "block_size": hash_block_size * scale,
        "hash_block_size": hash_block_size,
        "hashes": make_hashes(num_hashes, draw(st.sampled_from([0, 1, 20, 32, 64]))),
        "token_len": token_len,
        "block_ids": draw(st.lists(st.integers(0, 500), min_size=40, max_size=40)),
        "select": {
            "mask_num": draw(st.integers(0, token_len + 20)),
            "chunk_mask": draw(st.none() | st.lists(st.booleans(), max_size=45)),
            "put_step": put_step,
            "put_step_rank": draw(st.integers(0, put_step - 1)),
        },
    }


@given(requests(), st.sampled_from(["list", "blob", "tuple", "views"]))
def test_a_plan_gives_what_the_seed_api_gives(request: dict[str, Any], form: str) -> None:
    database = make_database(request["block_size"], request["hash_block_size"])
    hashes = request["hashes"]
    width = len(hashes[0]) if hashes else 32
    given_hashes: Any = {
        "list": hashes,
        "blob": BlobBlockHashes(b"".join(hashes), width),
        "tuple": tuple(hashes),
        "views": [memoryview(chunk_hash) for chunk_hash in hashes],
    }[form]
    if form == "blob" and width == 0:
        hashes = []
    chunks = list(database.process_tokens(request["token_len"], hashes, **request["select"]))
    addrs, sizes, block_ids = database.prepare_values(chunks, request["block_ids"])
    plan = database.plan(request["token_len"], given_hashes, request["block_ids"], **request["select"])
    assert len(plan) == len(chunks)
    assert plan.chunks == [(start, end) for start, end, _ in chunks]
    assert plan.hashes == [chunk_hash for _, _, chunk_hash in chunks]
    assert [type(chunk_hash) for chunk_hash in plan.hashes] == [bytes] * len(chunks)
    assert plan.keys == [database.key_for(chunk_hash) for _, _, chunk_hash in chunks]
    assert plan.block_ids == block_ids
    # A chunk is one block, so a short last chunk moves the whole of it, as in the seed API.
    assert (plan.addrs, plan.sizes) == (rows(addrs), rows(sizes))
    assert plan.num_bytes == sum(map(sum, sizes))


@given(st.data())
def test_narrowing_equals_the_same_steps_on_lists(data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(0, 20))
    plan = make_database().plan(num_chunks * 16, make_hashes(num_chunks), list(range(num_chunks)))
    blocks = list(range(num_chunks))
    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(st.sampled_from(["missing", "select", "rotate"]))
        if step == "missing":
            exists = data.draw(st.lists(st.sampled_from([1, 0, -1, -900]), max_size=len(blocks)))
            plan = plan.missing(exists)
            padded = [*exists, *[0] * (len(blocks) - len(exists))]
            blocks = [block for block, answer in zip(blocks, padded, strict=True) if answer != 1]
        elif step == "select" and blocks:
            indices = data.draw(st.lists(st.integers(-len(blocks), len(blocks) - 1), max_size=10))
            plan, blocks = plan.select(indices), [blocks[index] for index in indices]
        else:
            n = data.draw(st.integers(-50, 50))
            plan = plan.rotate(n)
            blocks = [blocks[(index + n) % len(blocks)] for index in range(len(blocks))]
        assert (plan.block_ids, len(plan)) == (blocks, len(blocks))
        assert plan.addrs == [tuple(make_database().prepare_value_for_block(block)[0]) for block in blocks]
        assert plan.num_bytes == len(blocks) * (4096 + 512 + 4096)


@pytest.mark.parametrize(
    ("bounds", "lengths"),
    [
        ({}, [5]),
        ({"max_segments": 6}, [2, 2, 1]),
        ({"max_segments": 7}, [2, 2, 1]),
        ({"max_segments": 1}, [1] * 5),
        ({"max_bytes": 8704}, [1] * 5),
        ({"max_bytes": 8704 * 3 - 1}, [2, 2, 1]),
        ({"max_bytes": 8704 * 3, "max_segments": 6}, [2, 2, 1]),
        ({"max_bytes": 1}, [1] * 5),
        ({"max_bytes": 2**63 - 1, "max_segments": 2**63 - 1}, [5]),
    ],
)
def test_split_keeps_order_and_bounds(bounds: dict[str, int], lengths: list[int]) -> None:
    plan = make_database().plan(80, make_hashes(5), [9, 8, 7, 6, 5])
    pieces = plan.split(**bounds)
    assert [len(piece) for piece in pieces] == lengths
    assert [block for piece in pieces for block in piece.block_ids] == [9, 8, 7, 6, 5]


def test_an_empty_plan_has_no_pieces() -> None:
    plan = make_database().plan(0, [], [])
    assert (plan.split(), plan.keys, plan.num_bytes, len(plan)) == ([], [], 0, 0)


@pytest.mark.parametrize("bounds", [{"max_bytes": 0}, {"max_segments": -1}])
def test_a_bound_below_one_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=r"(0|-1) is not at least 1"):
        make_database().plan(0, [], []).split(**bounds)


def test_concat_joins_groups_with_their_own_keys_and_rows() -> None:
    first, second = make_database(), ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0, group_id=1), 32, 16)
    second.set_regions([Region(64, 128, 100)], 10)
    hashes = make_hashes(4)
    plans = [first.plan(64, hashes, [1, 2, 3, 4]), second.plan(64, hashes, [5, 6])]
    joined = TransferPlan.concat(plans).rotate(3)
    whole = [
        (key, row, size) for plan in plans for key, row, size in zip(plan.keys, plan.addrs, plan.sizes, strict=True)
    ]
    whole = whole[3:] + whole[:3]
    assert list(zip(joined.keys, joined.addrs, joined.sizes, strict=True)) == whole
    assert joined.block_ids == [4, 5, 6, 1, 2, 3]
    assert joined.chunks == [(48, 64), (0, 32), (32, 64), (0, 16), (16, 32), (32, 48)]
    assert joined.addrs[1] == (64 + 5 * 128,)
    assert joined.num_bytes == sum(plan.num_bytes for plan in plans)
    assert len(TransferPlan.concat([])) == 0


def test_rows_and_sizes_are_made_once() -> None:
    database = make_database()
    first = database.plan(48, make_hashes(3), [1, 2, 3])
    second = database.plan(32, make_hashes(2), [3, 1])
    assert second.addrs[0] is first.addrs[2]
    assert second.addrs[1] is first.addrs[0]
    assert all(row is first.sizes[0] for row in [*first.sizes, *second.sizes])
    assert first.keys is first.keys
    hashes = make_hashes(2)
    assert all(a is b for a, b in zip(database.plan(32, hashes, [1, 2]).hashes, hashes, strict=True))


@pytest.mark.parametrize("change", ["base", "len", "regions", "cache"])
def test_registering_again_drops_rows_and_spares_plans_made_before(change: str) -> None:
    database = make_database()
    old = database.plan(16, make_hashes(1), [2])
    if change == "base":
        database.set_kv_caches_base_addr([base + 64 for base in BASES])
    elif change == "len":
        database.set_block_len([8192])
    elif change == "regions":
        database.set_regions([Region(0, 10_000, 8192)], 4)
    else:
        database.row_cache_bytes = 1 << 20
    new = database.plan(16, make_hashes(1), [2])
    expected = [0x7000_0000_0000 + 2 * 4096, 2**63 + 4096 + 2 * 512, 0x1000 + 2 * 4096]
    assert old.addrs == [tuple(expected)]
    assert new.addrs[0] is not old.addrs[0]
    assert (
        new.addrs
        == {
            "base": [tuple(addr + 64 for addr in expected)],
            "len": [tuple(base + 2 * 8192 for base in BASES)],
            "regions": [(20_000,)],
            "cache": [tuple(expected)],
        }[change]
    )


def test_a_new_row_cache_keeps_strides_and_the_number_of_blocks() -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    database.set_regions([Region(0x10000, 10_000, 8192)], 4)
    database.row_cache_bytes = 1 << 20
    assert database.prepare_value_for_block(1) == ([0x10000 + 10_000], [8192])
    with pytest.raises(LayoutError, match="block id 9 is not below the 4 registered blocks"):
        database.prepare_value_for_block(9)
    database.set_block_len([8192])
    assert database.prepare_value_for_block(9) == ([0x10000 + 9 * 8192], [8192])


def test_a_registration_that_is_refused_changes_nothing() -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    database.set_regions([Region(4096, 64, 64)], 4)
    for regions, num_blocks in (([Region(-1, 64, 64)], 4), ([Region(0, 64, 65)], 4), ([Region(0, 64, 64)], -1)):
        with pytest.raises((AddressOverflowError, LayoutError)):
            database.set_regions(regions, num_blocks)
        assert (database.kv_caches_base_addr, database.plan(16, make_hashes(1), [3]).addrs) == ([4096], [(4096 + 192,)])


def test_a_setter_in_the_middle_of_making_a_table_wins() -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)

    class Meddling:
        """An address whose conversion sets another one."""

        def __index__(self) -> int:
            database.set_kv_caches_base_addr([8192])
            return 4096

    meddling: Any = Meddling()
    database.set_block_len([64])
    database.set_kv_caches_base_addr([meddling])
    database.prepare_value_for_block(0)
    assert database.prepare_value_for_block(0) == ([8192], [64])


@pytest.mark.parametrize("row_cache_bytes", [-1, 2**63])
def test_a_row_cache_of_no_size_is_refused(row_cache_bytes: int) -> None:
    with pytest.raises(LayoutError, match=str(row_cache_bytes)):
        make_database().row_cache_bytes = row_cache_bytes


@pytest.mark.parametrize("row_cache_bytes", [0, 1000, 1 << 20])
def test_a_small_row_cache_forgets_but_never_errs(row_cache_bytes: int) -> None:
    database = make_database()
    database.row_cache_bytes = row_cache_bytes
    hashes = make_hashes(64)
    expected = [tuple(database.prepare_value_for_block(block)[0]) for block in range(64)]
    for _ in range(3):
        assert database.plan(1024, hashes, list(range(64))).addrs == expected
    last = database.plan(16, hashes, [63]).addrs[0]
    is_kept = row_cache_bytes > 0
    assert (database.plan(16, hashes, [63]).addrs[0] is last) == is_kept


def test_packed_slots_move_their_own_bytes_at_their_own_base() -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    base = 1 << 40
    database.set_regions([Region(base, 20_000, 8192), Region(base + 10_000, 20_000, 8192)], 3)
    plan = database.plan(32, make_hashes(2), [2, 0])
    assert plan.addrs == [(base + 40_000, base + 50_000), (base, base + 10_000)]
    assert plan.sizes == [(8192, 8192)] * 2
    assert plan.num_bytes == 4 * 8192


def test_null_blocks_are_left_out_and_counted() -> None:
    database = make_database()
    plan = database.plan(80, make_hashes(5), [0, 3, 0, 4, 0], null_block_id=0)
    assert (plan.block_ids, plan.num_null_blocks) == ([3, 4], 3)
    assert plan.chunks == [(16, 32), (48, 64)]
    assert plan.missing([1]).num_null_blocks == 3
    assert database.plan(32, make_hashes(2), [0, 1]).block_ids == [0, 1], "no null block unless one is named"


@pytest.mark.parametrize(
    ("block_id", "error", "message"),
    [
        (10, LayoutError, "block id 10 is not below the 10 registered blocks"),
        (2**62, LayoutError, f"block id {2**62} is not below the 10 registered blocks"),
        (-1, LayoutError, "block id -1 is negative"),
        (2**64, AddressOverflowError, str(2**64)),
    ],
)
def test_a_block_outside_never_becomes_a_row(block_id: int, error: type[Exception], message: str) -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    database.set_regions([Region(4096, 64, 64)], 10)
    with pytest.raises(error, match=message):
        database.plan(32, make_hashes(2), [9, block_id])
    with pytest.raises(error, match=message):
        database.prepare_values([(0, 16)], [block_id])
    assert database.plan(16, make_hashes(1), [9]).addrs == [(4096 + 9 * 64,)]


def test_addresses_alone_have_no_limit_but_that_of_64_bits() -> None:
    database = ChunkedTokenDatabase(KeyMetadata("m", 0, 0, 0, 0), 16)
    database.set_kv_caches_base_addr([0])
    database.set_block_len([2**32])
    assert database.plan(16, make_hashes(1), [2**32 - 1]).addrs == [(2**64 - 2**32,)]
    with pytest.raises(AddressOverflowError, match=f"block {2**32} of region 0"):
        database.plan(16, make_hashes(1), [2**32])


def test_the_checks_of_process_tokens_hold() -> None:
    database = make_database(32, 16)
    with pytest.raises(AssertionError, match=r"token_len \(17\) is not a multiple of hash_block_size \(16\)"):
        database.plan(17, make_hashes(2), [1])
    with pytest.raises(AssertionError, match="needs 3 block hashes of 16 tokens, got 2"):
        database.plan(48, make_hashes(2), [1])
    with pytest.raises(LayoutError, match=r"put_step_rank \(2\) is not in 0..2"):
        database.plan(32, make_hashes(2), [1], put_step=2, put_step_rank=2)
    with pytest.raises(IndexError, match=r"chunk 32..64 needs block 1 of a table of 1"):
        database.plan(64, make_hashes(4), [1])
    with pytest.raises(IndexError, match="chunk 1 of 1"):
        database.plan(32, make_hashes(2), [1]).select([1])
    with pytest.raises(LayoutError, match="2 answers to 1 keys"):
        database.plan(32, make_hashes(2), [1]).missing([0, 0])


def test_only_the_hashes_of_planned_chunks_are_touched() -> None:
    hashes = Recording(make_hashes(12))
    plan = make_database(32, 16).plan(192, hashes, [1] * 6, 32, chunk_mask=[True, False, True, True], put_step=2)
    assert plan.chunks == [(128, 160)]
    assert hashes.touched == [9]


def test_a_plan_is_a_snapshot() -> None:
    hashes, block_ids = make_hashes(2), [4, 5]
    plan = make_database().plan(32, hashes, block_ids)
    expected = list(hashes)
    hashes[0], block_ids[0] = bytes(32), 9
    assert (plan.hashes, plan.block_ids) == (expected, [4, 5])
    assert plan.keys[0].endswith(expected[0].hex())


def test_plans_in_a_reference_cycle_are_collected() -> None:
    class Holder(list[Any]):
        """A list that can be referred to weakly."""

    holder = Holder()
    holder.extend(make_hashes(1))
    plan = make_database().plan(16, holder, [1])
    holder.append(plan)
    gone = weakref.ref(holder)
    del holder, plan
    gc.collect()
    assert gone() is None


def test_many_threads_read_one_plan() -> None:
    database = make_database()
    hashes = make_hashes(2_000)
    expected = [tuple(database.prepare_value_for_block(block)[0]) for block in range(2_000)]
    plan = database.plan(32_000, hashes, list(range(2_000)))
    barrier = threading.Barrier(8)
    seen: list[bool] = []

    def read() -> None:
        barrier.wait()
        own = database.plan(32_000, hashes, list(range(2_000)))
        seen.append(plan.addrs == own.addrs == expected and plan.keys == own.keys and plan.addrs is plan.addrs)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8
