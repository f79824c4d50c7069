"""Inputs of the seed API, as values that can be run on any module that has it.

One case describes arguments and nothing else. `run` hands them to a module: `mooncrate.data`, its naive twin
(`reference`), or the module of vLLM that is the reference. `difference` says whether the docstring of `mooncrate.data`
lists a difference from the reference for just these arguments, and which; it is the one place that knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
from hypothesis import strategies as st

from outcome import Exactly, exactly, outcome

# The rows of the table of differences, by what they are about.
RANGE = "a chunk is a range of tokens, and a block id is not negative"
NO_LENGTH = "regions need a block length"
SIZES = "sizes are at least 1, widths not negative"
RANK = "a rank is below the step"
OVERFLOW = "nothing is past 64 bits"
UNSIGNED = "addresses are unsigned"
ORDER = "keys have a total order"
BUFFER = "a blob is read as bytes"
RAGGED = "negative indexes count from the end of the view"
INDEX = "any integer is an index, and nothing else"
TEXT = "a store takes no lone surrogates"
TYPES = "names are text, numbers integers"
RESULTS = "numbers in results are int"

API = Any
"""A module with the names of the seed API."""


@st.composite
def _usually(draw: st.DrawFn, good: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> Any:  # noqa: ANN401
    """One in twenty is odd."""
    return draw(odd if draw(st.sampled_from([False] * 19 + [True])) else good)


class RecordingHashes(Sequence[bytes]):
    """Hashes that remember which of them were handed out."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = hashes
        self.touched: list[int] = []

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - an index or a slice
        item = self.hashes[index]
        self.touched.append(index % len(self.hashes))
        return item


def made_up_hashes(num_hashes: int, width: int = 8) -> list[bytes]:
    """Hashes that differ, of a period of 251 and never alike when shifted."""
    return [bytes((index * 7 + place * 31) % 251 for place in range(width)) for index in range(num_hashes)]


# ---------------------------------------------------------------------------------------------------------------------
# Views over hashes


@dataclass(frozen=True)
class Access:
    """One thing to do with a view, given values that may be in it."""

    name: str
    call: Callable[[Any, Sequence[bytes]], object]
    index: object = None

    def __repr__(self) -> str:
        return self.name


def at(index: object) -> Access:
    """`view[index]`."""
    return Access(f"at({index!r})", lambda view, _: view[index], index)


def value_at(position: int, values: Sequence[bytes]) -> bytes:
    """Some value of the view, or one that is not there."""
    return values[position] if 0 <= position < len(values) else b"absent"


def contains(position: int) -> Access:
    """`value in view`."""
    return Access(f"contains({position})", lambda view, values: value_at(position, values) in view)


def index_of(position: int, ends: list[int]) -> Access:
    """`view.index(value, ...)`."""
    return Access(f"index_of({position}, {ends})", lambda view, values: view.index(value_at(position, values), *ends))


def count_of(position: int) -> Access:
    """`view.count(value)`."""
    return Access(f"count_of({position})", lambda view, values: view.count(value_at(position, values)))


WHOLE_VIEW = [
    Access("len", lambda view, _: len(view)),
    Access("list", lambda view, _: list(view)),
    Access("reversed", lambda view, _: list(reversed(view))),
]

small_indexes = st.integers(-12, 12)
indexes = st.one_of(
    _usually(small_indexes, small_indexes.map(np.int64)),
    st.sampled_from([True, 2**63, 2**70, -(2**63), -(2**70), 2**63 - 1]),
    st.builds(slice, st.none() | small_indexes, st.none() | small_indexes, st.none() | small_indexes),
)
not_indexes = st.sampled_from([0.0, 1.5, 99.0, "0", None, (0,), b"0", [0]])


view_accesses = [st.sampled_from(WHOLE_VIEW), indexes.map(at), not_indexes.map(at), small_indexes.map(contains)]
ends_of_search = st.lists(st.one_of(small_indexes, st.sampled_from([2**70, -(2**70)])), max_size=2)
sequence_accesses = [*view_accesses, st.builds(index_of, small_indexes, ends_of_search), small_indexes.map(count_of)]


def is_integer(index: object) -> bool:
    """Whether Python takes it for an index of a sequence."""
    return isinstance(index, SupportsIndex)


@dataclass(frozen=True)
class BlobCase:
    """A `BlobBlockHashes` and what is asked of it."""

    make_blob: Callable[[bytes], object]
    data: bytes
    hash_len: int
    accesses: list[Access]

    def run(self, api: API) -> object:
        """One outcome per access."""

        def results() -> list[Exactly]:
            view = api.BlobBlockHashes(self.make_blob(self.data), self.hash_len)
            width = max(1, self.hash_len)
            values = [self.data[start : start + width] for start in range(0, len(self.data), width)]
            return [outcome(partial(access.call, view, values)) for access in self.accesses]

        return outcome(results)

    def difference(self) -> str | None:
        """See the module."""
        if self.make_blob is not memoryview:
            return BUFFER
        if self.hash_len < 0:
            return SIZES
        if self.hash_len >= 2**63:
            return OVERFLOW
        if any(isinstance(access.index, float) for access in self.accesses):
            return INDEX
        return None


blob_cases = st.builds(
    BlobCase,
    st.sampled_from([memoryview] * 8 + [bytes, bytearray]),
    st.binary(max_size=150),
    _usually(st.sampled_from([0, 1, 2, 16, 20, 32, 64]) | st.integers(0, 70), st.sampled_from([200, -1, 2**63, 2**70])),
    st.lists(st.one_of(sequence_accesses), min_size=1, max_size=5),
)
"""Buffers of a few hashes with a ragged tail."""


def list_of(_: API, hashes: list[bytes]) -> Sequence[Any]:
    """The hashes as they usually come."""
    return hashes


def tuple_of(_: API, hashes: list[bytes]) -> Sequence[Any]:
    """Hashes in another sequence."""
    return tuple(hashes)


def blob_of(api: API, hashes: list[bytes]) -> Sequence[Any]:
    """The same hashes, of equal width, in a blob."""
    view: Sequence[Any] = api.BlobBlockHashes(memoryview(b"".join(hashes)), 8)
    return view


def view_of(api: API, hashes: list[bytes]) -> Sequence[Any]:
    """The same hashes, as the last ones of pairs."""
    pairs = [one for each in hashes for one in (b"first", each)]
    view: Sequence[Any] = api.chunk_hashes_for_block_size(pairs, 8, 16)
    return view


HASH_SOURCES = [list_of, tuple_of, blob_of, view_of]


@dataclass(frozen=True)
class ChunkViewCase:
    """A view of one hash per chunk and what is asked of it."""

    make_hashes: Callable[[API, list[bytes]], Sequence[Any]]
    num_hashes: int
    hash_block_size: int
    block_size: int
    accesses: list[Access]

    def run(self, api: API) -> object:
        """One outcome per access, then the hashes that were touched."""
        hashes = RecordingHashes(self.make_hashes(api, made_up_hashes(self.num_hashes)))

        def results() -> list[Exactly]:
            view = api.chunk_hashes_for_block_size(hashes, self.hash_block_size, self.block_size)
            values = made_up_hashes(self.num_hashes)
            return [outcome(partial(access.call, view, values)) for access in self.accesses]

        return [outcome(results), hashes.touched]

    def difference(self) -> str | None:
        """See the module."""
        given = [access.index for access in self.accesses]
        if any(is_integer(index) and not isinstance(index, int) for index in given):
            return INDEX
        if self.make_hashes is blob_of and any(isinstance(index, float) for index in given):
            return INDEX
        if self.hash_block_size == self.block_size:
            return None
        if self.hash_block_size < 1 or self.block_size < 1:
            return SIZES
        if self.block_size % self.hash_block_size:
            return None
        is_ragged = self.num_hashes % (self.block_size // self.hash_block_size) != 0
        return RAGGED if is_ragged and any(isinstance(index, int) and index < 0 for index in given) else None


@st.composite
def chunk_view_cases(draw: st.DrawFn) -> ChunkViewCase:
    """Views of up to twenty hashes, ragged or not."""
    hash_block_size = draw(_usually(st.sampled_from([1, 4, 16]), st.sampled_from([0, -16])))
    ratio = draw(_usually(st.integers(1, 6), st.sampled_from([0, -1])))
    block_size = hash_block_size * ratio + draw(_usually(st.just(0), st.sampled_from([1, -3])))
    num_hashes = draw(st.integers(0, 20))
    wanted = draw(st.lists(st.one_of(view_accesses), min_size=1, max_size=5))
    return ChunkViewCase(draw(st.sampled_from(HASH_SOURCES)), num_hashes, hash_block_size, block_size, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Keys

signed_64 = st.integers(-(2**63), 2**63 - 1)
ranks = st.one_of(st.integers(0, 64), signed_64)
names = st.one_of(
    st.sampled_from(["", "m", "org/model", "a@b", "@", "модель", "模型", "\U0001f680", "x\0y"]), st.text(max_size=12)
)
odd_ranks = st.sampled_from([2**63, -(2**70), True, np.int64(7), 1.5, "1"])
odd_names = st.sampled_from(["\ud800", "m\udfff", b"m", 5])
RANKS = ("tp_rank", "pcp_rank", "dcp_rank", "pp_rank")


metadata_fields: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "model_name": _usually(names, odd_names),
        **{rank: _usually(ranks, odd_ranks) for rank in RANKS},
        "group_id": _usually(ranks, odd_ranks),
        "cache_prefix": _usually(names, odd_names),
    }
)


def key_difference(texts: Sequence[object], numbers: Sequence[object]) -> str | None:
    """The difference that one part of a key makes."""
    if any(not isinstance(text, str) for text in texts) or any(type(number) is not int for number in numbers):
        return TYPES
    if any(not -(2**63) <= number < 2**63 for number in numbers if isinstance(number, int)):
        return OVERFLOW
    return TEXT if any(0xD800 <= ord(char) < 0xE000 for text in texts for char in str(text)) else None


@dataclass(frozen=True)
class KeyCase:
    """The fields of one key."""

    fields: dict[str, Any]
    overrides: dict[str, Any]
    chunk_hash: str
    raw_hash: bytes | memoryview | bytearray

    def run(self, api: API) -> object:
        """All the texts that come of it."""
        meta = api.KeyMetadata(**self.fields)
        key = api.PoolKey(meta, self.chunk_hash)
        twin = api.PoolKey(dataclasses.replace(meta), self.chunk_hash)
        other = dataclasses.replace(key, chunk_hash=self.chunk_hash + "0")
        return [
            outcome(lambda: api.PoolKey.build_prefix(meta)),
            outcome(lambda: api.PoolKey.build_prefix(meta, **self.overrides)),
            outcome(lambda: api.PoolKey.build_key_string("p", self.chunk_hash)),
            outcome(key.to_string),
            outcome(lambda: api.ChunkedTokenDatabase(meta, 16).key_for(self.raw_hash)),
            outcome(lambda: dataclasses.asdict(key)),
            outcome(lambda: (hash(key), key == twin, hash(key) == hash(twin), key == other, key != twin, repr(key))),
            outcome(lambda: hash(meta)),
            outcome(lambda: (key < other, key <= twin, key > other, key >= twin)),
            outcome(lambda: key < self.chunk_hash),
        ]

    def difference(self) -> str | None:
        """See the module."""
        texts = [self.fields["model_name"], self.fields["cache_prefix"], self.chunk_hash]
        overrides = [number for number in self.overrides.values() if number is not None]
        numbers = [*(self.fields[name] for name in (*RANKS, "group_id")), *overrides]
        return key_difference(texts, numbers)


raw_hashes = st.builds(
    lambda kind, data: kind(data), st.sampled_from([bytes, bytearray, memoryview]), st.binary(max_size=64)
)
key_cases = st.builds(
    KeyCase,
    metadata_fields,
    st.dictionaries(st.sampled_from(RANKS), _usually(st.none() | ranks, odd_ranks)),
    _usually(st.text(max_size=8) | st.binary(max_size=32).map(bytes.hex), st.just("\udc00")),
    raw_hashes,
)


@dataclass(frozen=True)
class OrderCase:
    """Some keys to be sorted."""

    keys: list[tuple[dict[str, Any], str]]

    def run(self, api: API) -> object:
        """Their texts in order."""

        def in_order() -> list[tuple[str, str]]:
            keys = [api.PoolKey(api.KeyMetadata(**fields), chunk_hash) for fields, chunk_hash in self.keys]
            return [(key.to_string(), key.chunk_hash) for key in sorted(keys)]

        return outcome(in_order)

    def difference(self) -> str | None:
        """See the module."""
        return ORDER if any(fields != self.keys[0][0] for fields, _ in self.keys) else None


few_fields = st.fixed_dictionaries(
    {"model_name": st.sampled_from(["", "m", "n"]), **{rank: st.integers(0, 1) for rank in RANKS}},
    optional={"group_id": st.integers(-1, 1), "cache_prefix": st.sampled_from(["", "p"])},
)


@st.composite
def order_cases(draw: st.DrawFn) -> OrderCase:
    """Keys of one or of several ranks."""
    hashes = draw(st.lists(st.text("0af", max_size=2), max_size=6))
    if draw(st.booleans()):
        fields = draw(few_fields)
        return OrderCase([(fields, chunk_hash) for chunk_hash in hashes])
    return OrderCase([(draw(few_fields), chunk_hash) for chunk_hash in hashes])


# ---------------------------------------------------------------------------------------------------------------------
# Chunks


def new_database(api: API, block_size: int = 16, hash_block_size: int | None = None) -> Any:  # noqa: ANN401 - any module's
    """A database of rank 0."""
    return api.ChunkedTokenDatabase(api.KeyMetadata("m", 0, 0, 0, 0), block_size, hash_block_size)


@dataclass(frozen=True)
class GridCase:
    """The sizes of a database."""

    block_size: int
    hash_block_size: int | None

    def run(self, api: API) -> object:
        """The sizes that it has."""

        def sizes() -> tuple[int, int]:
            database = new_database(api, self.block_size, self.hash_block_size)
            return database.block_size, database.hash_block_size

        return outcome(sizes)

    def difference(self) -> str | None:
        """See the module."""
        sizes = [self.block_size, self.hash_block_size or self.block_size]
        if any(not -(2**63) <= size < 2**63 for size in sizes):
            return OVERFLOW
        return SIZES if min(sizes) < 1 else None


any_size = st.one_of(st.integers(-3, 40), st.sampled_from([16, 128, 2**62, 2**63, 2**70, -(2**63)]))
grid_cases = st.builds(GridCase, any_size, st.none() | any_size)


@dataclass(frozen=True)
class ChunksCase:
    """A call of `process_tokens`."""

    token_len: int
    make_hashes: Callable[[API, list[bytes]], Sequence[Any]]
    num_hashes: int
    mask_num: int
    options: dict[str, Any]
    ratio: int = 1
    hash_block_size: int = 4

    def run(self, api: API) -> object:
        """What comes item by item, until two errors (the last one says that it ended), and what was touched."""
        database = new_database(api, self.hash_block_size * self.ratio, self.hash_block_size)
        hashes = RecordingHashes(self.make_hashes(api, made_up_hashes(self.num_hashes)))
        chunks = database.process_tokens(self.token_len, hashes, self.mask_num, **self.options)
        results = [outcome(lambda: next(chunks)) for _ in range(self.num_hashes + 2)]
        return [results, hashes.touched]

    def difference(self) -> str | None:
        """See the module."""
        step, rank = self.options.get("put_step", 1), self.options.get("put_step_rank", 0)
        if any(not -(2**63) <= number < 2**63 for number in (self.token_len, self.mask_num, step, rank)):
            return OVERFLOW
        return RANK if step > 0 and not 0 <= rank < step else None


truths: st.SearchStrategy[object] = st.sampled_from(
    [True, True, False, 1, 0, None, "", "yes", np.True_, np.False_, [], 0.0]
)
masks = st.one_of(
    st.lists(truths, max_size=12),
    st.lists(truths, max_size=12).map(tuple),
    st.lists(st.booleans(), max_size=12).map(lambda mask: np.array(mask, dtype=np.bool_)),
    st.binary(max_size=12).map(lambda mask: bytes(byte % 2 for byte in mask)),
)


@st.composite
def chunks_cases(draw: st.DrawFn) -> ChunksCase:
    """Requests of up to 24 hashes, most of them in order."""
    ratio = draw(st.integers(1, 4))
    num_hashes = draw(st.integers(0, 24))
    aligned = st.integers(0, num_hashes).map(lambda number: number * 4)
    token_len = draw(_usually(aligned, st.integers(-20, 100) | st.sampled_from([2**63, -(2**70), 2**63 - 4])))
    mask_num = draw(_usually(st.integers(-5, 100), st.sampled_from([2**63 - 1, -(2**63), 2**70])))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["chunk_mask"] = draw(st.none() | masks)
    if draw(st.booleans()):
        step = draw(st.integers(1, 5))
        options["put_step"] = draw(_usually(st.just(step), st.sampled_from([0, -1, 2**63, 2**62])))
        options["put_step_rank"] = draw(_usually(st.integers(0, step - 1), st.sampled_from([step, -1, 2**70])))
    return ChunksCase(token_len, draw(st.sampled_from(HASH_SOURCES)), num_hashes, mask_num, options, ratio)


# ---------------------------------------------------------------------------------------------------------------------
# Addresses

EDGES = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**63 + 4096, 2**64 - 4096, 2**64 - 1, 2**64, -1, -(2**63)]
usual_bases = st.integers(0, 2**47)
bases = st.one_of(usual_bases, usual_bases, st.sampled_from(EDGES), st.integers(0, 2**64 - 1))
usual_lengths = st.integers(0, 2**24)
lengths = st.one_of(usual_lengths, usual_lengths, st.sampled_from([0, 1, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, -1]))
usual_block_ids = st.integers(0, 10_000)
block_id_numbers = _usually(usual_block_ids, st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**70, -1, -7]))


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Bases, and as many lengths or fewer or more; of ordinary memory half of the time."""
    if draw(st.booleans()):
        return draw(st.lists(usual_bases, max_size=6)), draw(st.lists(usual_lengths, min_size=1, max_size=7))
    return draw(st.lists(bases, max_size=6)), draw(st.lists(lengths, max_size=7))


def memory_difference(base_addrs: list[int], block_len: list[int]) -> str | None:
    """The difference that the regions alone make."""
    if any(not 0 <= number < 2**63 for number in (*base_addrs, *block_len)):
        return UNSIGNED
    return NO_LENGTH if base_addrs and not block_len else None


def row_difference(
    base_addrs: list[int], block_len: list[int], block_id: int, num_blocks: int, limit: int
) -> str | None:
    """The difference that one row makes, where arithmetic ends at `limit`."""
    if block_id < 0:
        return RANGE
    for index, base in enumerate(base_addrs):
        length = block_len[index % len(block_len)]
        if max(base + block_id * length, length * num_blocks, block_id) >= limit:
            return OVERFLOW
        if base + block_id * length + length * num_blocks > 2**64:
            return OVERFLOW
    return OVERFLOW if block_id >= limit else None


@dataclass(frozen=True)
class BlockCase:
    """A call of `prepare_value_for_block`."""

    memory: tuple[list[int], list[int]]
    block_id: Any

    def run(self, api: API) -> object:
        """Addresses and sizes."""
        database = new_database(api)
        database.set_kv_caches_base_addr(list(self.memory[0]))
        database.set_block_len(list(self.memory[1]))
        return outcome(lambda: database.prepare_value_for_block(self.block_id))

    def difference(self) -> str | None:
        """See the module."""
        base_addrs, block_len = self.memory
        if type(self.block_id) is not int:
            return RESULTS
        if any(not 0 <= number < 2**64 for number in (*base_addrs, *block_len)):
            return UNSIGNED
        if base_addrs and not block_len:
            return NO_LENGTH
        if not -(2**63) <= self.block_id < 2**63:
            return OVERFLOW
        return row_difference(base_addrs, block_len, self.block_id, 1, 2**64)


block_cases = st.builds(BlockCase, memories(), _usually(block_id_numbers, st.sampled_from([np.int64(3), True])))


@dataclass(frozen=True)
class AddressCase:
    """A call of `prepare_values`."""

    memory: tuple[list[int], list[int]]
    chunks: Sequence[Any]
    block_ids: Any
    ratio: int
    hash_block_size: int = 4

    def run(self, api: API) -> object:
        """Rows of addresses and of sizes, and block ids; then the same of the first chunk alone."""
        database = new_database(api, self.hash_block_size * self.ratio, self.hash_block_size)
        database.set_kv_caches_base_addr(list(self.memory[0]))
        database.set_block_len(list(self.memory[1]))
        results = [outcome(lambda: database.prepare_values(self.chunks, self.block_ids))]
        if len(self.chunks) == 1:
            start, end, *_ = self.chunks[0]
            results.append(outcome(lambda: database.prepare_value(start, end, self.block_ids)))
        return results

    def difference(self) -> str | None:
        """See the module."""
        base_addrs, block_len = self.memory
        if len(self.chunks) == 0:
            return None
        if found := memory_difference(base_addrs, block_len):
            return found
        found = None
        for start, end, *_ in self.chunks:
            found = found or self._chunk_difference(int(start), int(end))
        return found

    def _chunk_difference(self, start: int, end: int) -> str | None:
        if not (-(2**63) <= start < 2**63 and -(2**63) <= end < 2**63):
            return OVERFLOW
        if start < 0 or end < start:
            return RANGE
        block_size = self.hash_block_size * self.ratio
        index, num_blocks = start // block_size, -(-(end - start) // block_size)
        if index >= len(self.block_ids):
            return None
        block_id = self.block_ids[index]
        if isinstance(block_id, float):
            return TYPES
        return row_difference(*self.memory, int(block_id), num_blocks, 2**63)


@st.composite
def address_cases(draw: st.DrawFn) -> AddressCase:
    """Up to eight chunks, most of them in hash blocks and inside the block table."""
    ratio = draw(st.integers(1, 4))
    in_order = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(
        lambda pair: (pair[0] * 4, (pair[0] + pair[1]) * 4)
    )
    odd = st.tuples(
        st.integers(-9, 170) | st.sampled_from([2**63 - 16, -(2**63), 2**63]),
        st.integers(-9, 200) | st.sampled_from([2**63 - 16, 2**63, -(2**70)]),
    )
    chunk = _usually(in_order, odd)
    kinds: list[Callable[[tuple[int, int]], object]] = [tuple, list, lambda pair: (*pair, b"hash")]
    if draw(st.booleans()):
        chunk, kinds = in_order, [*kinds, lambda pair: (np.int64(pair[0]), np.int64(pair[1]))]
    chunks = draw(st.lists(st.builds(lambda kind, pair: kind(pair), st.sampled_from(kinds), chunk), max_size=8))
    num_blocks, first = draw(st.integers(0, 50) | st.just(50)), draw(usual_block_ids)
    table: Any = [(first + 251 * index) % 10_000 for index in range(num_blocks)]
    for index, block_id in draw(st.dictionaries(st.integers(0, 49), block_id_numbers, max_size=2)).items():
        table[index : index + 1] = [block_id]
    kind = draw(st.sampled_from(["list", "list", "tuple", "array", "bool"]))
    if kind == "array":
        table = np.array([block_id % 2**40 for block_id in table], dtype=np.int64)
    elif kind == "bool":
        table = [block_id % 2 == 0 for block_id in table]
    return AddressCase(
        draw(memories()),
        draw(st.sampled_from([list, tuple]))(chunks),
        tuple(table) if kind == "tuple" else table,
        ratio,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Requests

Step = tuple[str, Any]
block_groups = st.lists(st.lists(st.integers(0, 999), max_size=4), max_size=3)
load_specs = st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans())
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("schedule"), st.integers(0, 70)),
    st.tuples(st.just("tokens"), st.none() | st.lists(st.integers(0, 9), max_size=3)),
    st.tuples(st.just("update"), block_groups.map(tuple)),
    st.tuples(st.just("update"), st.lists(st.integers(0, 999), max_size=4)),
    st.tuples(st.just("update"), st.sampled_from([(None,), ([],), ([1], [2])])),
    st.tuples(st.just("allocate"), block_groups.map(tuple)),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(
        st.just("tell"),
        st.fixed_dictionaries(
            {"block_size": st.sampled_from([1, 4, 16, 16])},
            optional={
                "load_spec": load_specs,
                "skip_save": st.sampled_from([None, False, True]),
                "block_hashes": st.none() | st.just([b"hash"]),
                "is_last_chunk": st.sampled_from([None, False, True]),
            },
        ),
    ),
)


@dataclass(frozen=True)
class RequestCase:
    """The life of one request."""

    num_groups: int
    steps: list[Step]

    def run(self, api: API) -> object:
        """The tracker after each step, what was told, and in the end all that the workers were told."""
        tracker = api.RequestTracker("request", 0, tuple([group] for group in range(self.num_groups)))
        metadata = api.MooncakeStoreConnectorMetadata({"request"}, set())
        results = []
        for name, argument in self.steps:
            done = outcome(partial(self.step, api, tracker, metadata, name, argument))
            results.append((done, exactly(tracker)))
        results.append((exactly(metadata.unfinished_request_ids), exactly(len(metadata.requests))))
        return results

    @staticmethod
    def step(api: API, tracker: Any, metadata: Any, name: str, argument: Any) -> object:  # noqa: ANN401 - any module's
        """Do one step."""
        if name == "schedule":
            tracker.token_len += argument
        elif name == "tokens":
            tracker.token_ids = argument if argument is None else list(argument)
        elif name == "update":
            return tracker.update(argument)
        elif name == "allocate":
            tracker.allocated_block_ids = tuple(list(blocks) for blocks in argument)
        elif name == "reset":
            return tracker.reset()
        else:
            spec = argument.get("load_spec")
            arguments = {**argument, "load_spec": spec and api.LoadSpec(*spec)}
            told = api.ReqMeta.from_request_tracker(tracker, **arguments)
            if told is not None:
                metadata.add_request(told)
            return told
        return None

    def difference(self) -> str | None:
        """None: snapshots differ only later, when the tracker has changed."""
        return None


request_cases = st.builds(RequestCase, st.integers(0, 3), st.lists(steps, max_size=12))

STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "blob": blob_cases,
    "chunk view": chunk_view_cases(),
    "key": key_cases,
    "order": order_cases(),
    "grid": grid_cases,
    "chunks": chunks_cases(),
    "addresses": address_cases(),
    "block": block_cases,
    "request": request_cases,
}
"""Cases of all kinds, by name."""
