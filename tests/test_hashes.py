"""Views over block hashes: what they read, what they refuse, what they touch, and when they let go."""

from __future__ import annotations

import array
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given

import mooncrate.data
import reference
from cases import STRATEGIES, BlobCase, ChunkViewCase, RecordingHashes, made_up_hashes
from mooncrate.data import BlobBlockHashes, _CompactChunkHashList, chunk_hashes_for_block_size
from mooncrate.errors import AddressOverflowError, LayoutError

DATA = b"".join(made_up_hashes(4, width=32))
HASHES = [DATA[start : start + 32] for start in range(0, len(DATA), 32)]


@given(STRATEGIES["blob"])
def test_blobs_agree_with_the_twin(case: BlobCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


@given(STRATEGIES["chunk view"])
def test_chunk_views_agree_with_the_twin(case: ChunkViewCase) -> None:
    assert case.run(mooncrate.data) == case.run(reference)


# Buffers


def read_only_array() -> np.ndarray[Any, Any]:
    values = np.frombuffer(DATA, dtype=np.uint8).copy()
    values.setflags(write=False)
    return values


BUFFERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: DATA,
    "bytearray": lambda: bytearray(DATA),
    "memoryview": lambda: memoryview(DATA),
    "memoryview of chars": lambda: memoryview(DATA).cast("c"),
    "memoryview of signed": lambda: memoryview(DATA).cast("b"),
    "memoryview of words": lambda: memoryview(DATA).cast("Q"),
    "memoryview of doubles": lambda: memoryview(DATA).cast("d"),
    "memoryview of rows": lambda: memoryview(DATA).cast("B", (4, 32)),
    "memoryview of a part": lambda: memoryview(b"xyz" + DATA + b"tail")[3:-4],
    "array.array": lambda: array.array("I", DATA),
    "numpy bytes": lambda: np.frombuffer(DATA, dtype=np.uint8),
    "numpy read-only": read_only_array,
    "numpy rows": lambda: np.frombuffer(DATA, dtype=np.uint8).reshape(4, 32),
    "numpy cube": lambda: np.frombuffer(DATA, dtype=np.uint8).reshape(4, 8, 4),
    "numpy words": lambda: np.frombuffer(DATA, dtype=np.int64),
    "numpy big-endian": lambda: np.frombuffer(DATA, dtype=">u4"),
    "numpy strings": lambda: np.frombuffer(DATA, dtype="S32"),
    "numpy records": lambda: np.frombuffer(DATA, dtype=[("a", "u1"), ("b", "S31")]),
    "numpy part": lambda: np.frombuffer(b"x" + DATA, dtype=np.uint8)[1:],
}


@pytest.mark.parametrize("name", BUFFERS)
def test_any_contiguous_buffer_is_read_as_bytes(name: str) -> None:
    view = BlobBlockHashes(BUFFERS[name](), 32)
    assert list(view) == HASHES
    for item in view:
        assert type(item) is memoryview
        assert (item.format, item.ndim, item.nbytes) == ("B", 1, 32)


EMPTY: dict[str, Any] = {
    "bytes": b"",
    "bytearray": bytearray(),
    "memoryview": memoryview(b""),
    "words": memoryview(b"").cast("Q"),
    "numpy bytes": np.zeros(0, np.uint8),
    "numpy rows": np.zeros((0, 32), np.uint8),
    "numpy strings": np.zeros(0, "S32"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_buffer_holds_no_hashes(name: str) -> None:
    view = BlobBlockHashes(EMPTY[name], 32)
    assert len(view) == 0
    assert list(view) == []
    assert not view
    with pytest.raises(IndexError, match="hash 0 of 0"):
        view[0]


@pytest.mark.parametrize(
    "strided",
    [
        memoryview(DATA)[::2],
        memoryview(DATA)[::-1],
        np.frombuffer(DATA, dtype=np.uint8)[::2],
        np.frombuffer(DATA, dtype=np.uint8).reshape(4, 32).T,
        np.frombuffer(DATA, dtype=np.uint8).reshape(4, 32)[:, :16],
        np.asfortranarray(np.frombuffer(DATA, dtype=np.uint8).reshape(4, 32)),
    ],
)
def test_a_strided_buffer_is_refused(strided: Any) -> None:  # noqa: ANN401 - any buffer
    with pytest.raises(LayoutError, match="not contiguous"):
        BlobBlockHashes(strided, 32)


@pytest.mark.parametrize("blob", ["text", 5, None, [1, 2, 3], object()])
def test_what_is_no_buffer_is_a_type_error(blob: Any) -> None:  # noqa: ANN401 - no buffer
    with pytest.raises(TypeError):
        BlobBlockHashes(blob, 32)


def test_a_released_memoryview_is_refused() -> None:
    blob = memoryview(DATA)
    blob.release()
    with pytest.raises(ValueError, match="released"):
        BlobBlockHashes(blob, 32)


@pytest.mark.parametrize(
    ("num_bytes", "hash_len", "num_hashes"),
    [(0, 32, 0), (1, 32, 0), (31, 32, 0), (32, 32, 1), (33, 32, 1), (63, 32, 1), (64, 32, 2), (64, 0, 0), (3, 1, 3)],
)
def test_boundaries_of_length(num_bytes: int, hash_len: int, num_hashes: int) -> None:
    blob = bytes(place % 251 for place in range(num_bytes))
    view = BlobBlockHashes(blob, hash_len)
    assert len(view) == num_hashes
    assert b"".join(view) == blob[: num_hashes * hash_len]


@pytest.mark.parametrize("hash_len", [-1, -32, -(2**63)])
def test_a_negative_width_is_refused(hash_len: int) -> None:
    with pytest.raises(LayoutError, match=f"^{hash_len} is not a number of bytes per hash$"):
        BlobBlockHashes(DATA, hash_len)


def test_a_width_past_64_bits_or_of_another_type() -> None:
    with pytest.raises(AddressOverflowError, match=str(2**63)):
        BlobBlockHashes(DATA, 2**63)
    for odd in (32.0, "32", None):
        with pytest.raises(TypeError):
            BlobBlockHashes(DATA, odd)  # type: ignore[arg-type]
    assert len(BlobBlockHashes(DATA, np.int64(32))) == 4


# Both views as sequences


class Index:
    """An integer of another type."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def blob_view() -> Sequence[Any]:
    return BlobBlockHashes(DATA, 32)


def chunk_view() -> Sequence[Any]:
    between = [one for each in HASHES for one in (b"first", b"second", each)]
    return chunk_hashes_for_block_size([*between, b"ragged"], 16, 48)


views = pytest.mark.parametrize("make_view", [blob_view, chunk_view])
MakeView = Callable[[], Sequence[Any]]


@views
def test_is_a_sequence(make_view: MakeView) -> None:
    view = make_view()
    assert isinstance(view, Sequence)
    assert len(view) == 4
    assert list(view) == HASHES
    assert list(reversed(view)) == HASHES[::-1]
    assert [view[i] for i in range(4)] == HASHES
    iterator = iter(view)
    assert next(iterator) == HASHES[0]
    assert list(iterator) == HASHES[1:]
    assert list(iterator) == []
    assert list(zip(view, reversed(view), strict=True)) == list(zip(HASHES, HASHES[::-1], strict=True))


@views
@pytest.mark.parametrize(
    "index", [-5, 4, 2**63 - 1, 2**63, -(2**63), 2**100, -(2**100), np.int64(4), Index(-5), Index(2**70)]
)
def test_an_index_outside_is_an_index_error(make_view: MakeView, index: Any) -> None:  # noqa: ANN401
    with pytest.raises(IndexError, match=r"hash .* of 4"):
        make_view()[index]


@views
@pytest.mark.parametrize("index", [0, 3, -1, -4, True, np.int8(2), np.uint64(3), np.int64(-2), Index(1), Index(-3)])
def test_any_integer_is_an_index(make_view: MakeView, index: Any) -> None:  # noqa: ANN401
    assert make_view()[index] == HASHES[index]


@views
@pytest.mark.parametrize("index", [0.0, 1.5, 99.0, math.nan, np.float64(1), "0", b"0", None, (0,), [0], {}])
def test_what_is_no_integer_is_a_type_error(make_view: MakeView, index: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError):
        make_view()[index]


@views
def test_an_error_inside_an_index_stays_what_it_is(make_view: MakeView) -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("broken index")

    with pytest.raises(RuntimeError, match="broken index"):
        make_view()[cast(int, Broken())]


@views
def test_slices_are_those_of_a_list(make_view: MakeView) -> None:
    view = make_view()
    ends = [None, 0, 1, 3, 4, 5, 99, -1, -4, -5, -99, 2**70, -(2**70)]
    for start in ends:
        for stop in ends:
            for step in (None, 1, 2, 5, -1, -3, 2**70, -(2**70)):
                part = view[start:stop:step]
                assert type(part) is list
                assert part == HASHES[start:stop:step]
    with pytest.raises(ValueError, match="zero"):
        view[::0]
    with pytest.raises(TypeError):
        view[cast(Any, slice(0.5, None))]


@views
def test_searching_is_that_of_a_sequence(make_view: MakeView) -> None:
    class Twin(Sequence[Any]):
        """The same items with the methods that Python gives a sequence."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
            return HASHES[index]

    def found(view: Sequence[Any], value: object, ends: tuple[int, ...]) -> int | None:
        try:
            return view.index(value, *ends)
        except ValueError:
            return None

    view, twin = make_view(), Twin()
    for value in [*HASHES, memoryview(HASHES[1]), bytearray(HASHES[2]), b"", b"absent", "text", None, 5]:
        assert (value in view) == (value in twin)
        assert view.count(value) == twin.count(value)
        for ends in [
            (),
            (1,),
            (-2,),
            (0, 2),
            (1, -1),
            (3, 1),
            (-99, 99),
            (9,),
            (-(2**70), 2**70),
            (2**70,),
            (0, -(2**70)),
        ]:
            assert found(view, value, ends) == found(twin, value, ends)
    with pytest.raises(ValueError, match="4 hashes"):
        view.index(b"absent")


def test_equal_hashes_are_found_first_and_counted() -> None:
    view = BlobBlockHashes(b"aabbaacc", 2)
    assert view.index(b"aa") == 0
    assert view.index(b"aa", 1) == 2
    assert view.count(b"aa") == 2
    assert view.count(b"ab") == 0


@views
def test_a_view_is_what_it_was_made_of(make_view: MakeView) -> None:
    view = make_view()
    assert view == view  # noqa: PLR0124 - by identity
    assert view != make_view()
    assert isinstance(hash(view), int)
    with pytest.raises(AttributeError):
        view.scale_factor = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type("Sub", (type(view),), {})
    with pytest.raises(TypeError):
        view[0] = b""  # type: ignore[index]


def test_blobs_say_what_they_are() -> None:
    assert repr(BlobBlockHashes(DATA, 32)) == "BlobBlockHashes(4 hashes of 32 bytes)"


# Memory


def test_nothing_is_copied() -> None:
    blob = bytearray(DATA)
    view = BlobBlockHashes(blob, 32)
    item = view[1]
    blob[32] = 250
    assert item[0] == view[1][0] == 250
    words = np.zeros((2, 32), dtype=np.uint8)
    rows = BlobBlockHashes(words, 32)
    words[1, 5] = 251
    assert rows[1][5] == 251


def resize(blob: bytearray) -> None:
    blob.extend(b"more")


@pytest.mark.parametrize("keep", ["view", "item", "slice", "iterator", "chunk view", "chunks"])
def test_the_buffer_is_held_while_anything_needs_it_and_then_released(keep: str) -> None:
    blob = bytearray(DATA)
    held: dict[str, Callable[[BlobBlockHashes], object]] = {
        "view": lambda view: view,
        "item": lambda view: view[2],
        "slice": lambda view: view[1:3],
        "iterator": iter,
        "chunk view": lambda view: chunk_hashes_for_block_size(view, 16, 32),
        "chunks": lambda view: mooncrate.data.ChunkedTokenDatabase(metadata(), 16).process_tokens(64, view),
    }
    kept = held[keep](BlobBlockHashes(blob, 32))
    with pytest.raises(BufferError):
        resize(blob)
    del kept
    resize(blob)


def metadata() -> mooncrate.data.KeyMetadata:
    return mooncrate.data.KeyMetadata("m", 0, 0, 0, 0)


def test_an_exhausted_iterator_lets_go() -> None:
    blob = bytearray(DATA)
    chunks = mooncrate.data.ChunkedTokenDatabase(metadata(), 16).process_tokens(64, BlobBlockHashes(blob, 32))
    assert sum(1 for _ in chunks) == 4
    resize(blob)
    assert list(chunks) == []


def test_a_buffer_behind_numpy_is_released_too() -> None:
    words = array.array("Q", DATA)
    view = BlobBlockHashes(words, 32)
    with pytest.raises(BufferError):
        words.append(1)
    del view
    words.append(1)


def test_a_refused_buffer_is_released() -> None:
    blob = bytearray(DATA)
    for hash_len in (-1, 2**63):
        with pytest.raises((LayoutError, AddressOverflowError)):
            BlobBlockHashes(blob, hash_len)
    resize(blob)


class Blob(bytearray):
    """A buffer that can be part of a cycle."""

    view: object


class Hashes(list[Any]):
    """A list that can be part of a cycle and be watched."""


def test_cycles_are_collected() -> None:
    blob = Blob(DATA)
    blob.view = BlobBlockHashes(blob, 32)
    hashes = Hashes(made_up_hashes(4))
    hashes.append(chunk_hashes_for_block_size(hashes, 16, 32))
    hashes.append(iter(hashes[-1]))
    asked = Hashes(made_up_hashes(4))
    asked.append(mooncrate.data.ChunkedTokenDatabase(metadata(), 16).process_tokens(64, asked))
    running = Hashes(made_up_hashes(4))
    running.append(mooncrate.data.ChunkedTokenDatabase(metadata(), 16).process_tokens(64, running, chunk_mask=running))
    next(running[-1])
    alive: list[Callable[[], object]] = [weakref.ref(one) for one in (blob, hashes, asked, running)]
    del blob, hashes, asked, running
    gc.collect()
    assert [one() for one in alive] == [None] * 4


# Chunk hashes


def test_equal_sizes_give_the_hashes_themselves() -> None:
    for hashes in (HASHES, tuple(HASHES), BlobBlockHashes(DATA, 32)):
        assert chunk_hashes_for_block_size(hashes, 16, 16) is hashes


def test_only_the_item_asked_for_is_touched() -> None:
    hashes = RecordingHashes(made_up_hashes(11))
    view = chunk_hashes_for_block_size(hashes, 4, 12)
    assert isinstance(view, _CompactChunkHashList)
    assert (view.block_hashes, view.scale_factor, len(view)) == (hashes, 3, 3)
    assert hashes.touched == []
    assert view[1] is hashes.hashes[5]
    assert view[-1] is hashes.hashes[8]
    assert view[::2] == [hashes.hashes[2], hashes.hashes[8]]
    assert hashes.touched == [5, 8, 2, 8]
    hashes.touched.clear()
    iterator = iter(view)
    assert hashes.touched == []
    next(iterator)
    assert hashes.touched == [2]
    assert hashes.hashes[5] in view
    assert hashes.touched == [2, 2, 5]


@pytest.mark.parametrize(
    "hashes",
    [
        made_up_hashes(12, 32),
        tuple(made_up_hashes(12, 32)),
        BlobBlockHashes(b"".join(made_up_hashes(12, 32)), 32),
        chunk_hashes_for_block_size([one for each in made_up_hashes(12, 32) for one in (b"", each)], 8, 16),
        np.array(made_up_hashes(12, 32), dtype="S32"),
    ],
    ids=["list", "tuple", "blob", "view", "numpy"],
)
def test_over_any_sequence(hashes: Any) -> None:  # noqa: ANN401 - any sequence
    view = chunk_hashes_for_block_size(hashes, 16, 48)
    assert list(view) == [made_up_hashes(12, 32)[index] for index in (2, 5, 8, 11)]
    assert view[-1] == hashes[11]


def test_a_list_that_grows_is_seen() -> None:
    hashes = made_up_hashes(3)
    view = chunk_hashes_for_block_size(hashes, 16, 32)
    assert len(view) == 1
    hashes.append(b"new")
    assert (len(view), view[-1]) == (2, b"new")


def test_an_error_below_comes_through() -> None:
    class Broken(RecordingHashes):
        def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
            raise RuntimeError(f"no hash {index}")

    view = chunk_hashes_for_block_size(Broken(made_up_hashes(4)), 16, 32)
    for call in cast(
        list[Callable[[], object]], [lambda: view[0], lambda: list(view), lambda: b"" in view, lambda: view[:]]
    ):
        with pytest.raises(RuntimeError, match="no hash 1"):
            call()
    with pytest.raises(TypeError):
        len(chunk_hashes_for_block_size(cast(Sequence[bytes], 5), 16, 32))


@pytest.mark.parametrize("make", [chunk_hashes_for_block_size, _CompactChunkHashList])
def test_sizes_that_do_not_fit(make: Callable[..., Iterator[bytes]]) -> None:
    with pytest.raises(AssertionError, match=r"target_block_size \(24\) is not a multiple of hash_block_size \(16\)"):
        make(HASHES, 16, 24)
    for hash_block_size, block_size in [(0, 16), (-16, 16), (16, 0), (16, -16)]:
        with pytest.raises(LayoutError, match=str(min(hash_block_size, block_size))):
            make(HASHES, hash_block_size, block_size)
    with pytest.raises(TypeError):
        make(HASHES, 16.0, 32)


def test_objects_are_no_hashes() -> None:
    with pytest.raises(TypeError, match="array of objects holds their addresses"):
        BlobBlockHashes(np.array([b"a", None], dtype=object), 2)


def test_the_reference_has_a_name_for_the_hash_of_a_chunk() -> None:
    view: Any = chunk_hashes_for_block_size([b"0", b"1", b"2", b"3"], 16, 32)
    assert (view._get_value_at(0), view._get_value_at(-1)) == (b"1", b"3")
