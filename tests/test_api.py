"""The seed API from outside: names, signatures and fields of the reference, without its weight; pickles and threads."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mooncrate.data
from cases import made_up_hashes
from mooncrate.data import (
    BlobBlockHashes,
    ChunkedTokenDatabase,
    KeyMetadata,
    LoadSpec,
    MooncakeStoreConnectorMetadata,
    PoolKey,
    ReqMeta,
    RequestTracker,
    chunk_hashes_for_block_size,
)

# Names and defaults as the reference has them; `self` left out.
SIGNATURES = {
    "BlobBlockHashes": "(blob, hash_len)",
    "_CompactChunkHashList": "(block_hashes, hash_block_size, target_block_size)",
    "chunk_hashes_for_block_size": "(block_hashes, hash_block_size, block_size)",
    "KeyMetadata": "(model_name, tp_rank, pcp_rank, dcp_rank, pp_rank, group_id=0, cache_prefix='')",
    "PoolKey": "(key_metadata, chunk_hash)",
    "PoolKey.build_prefix": "(key_metadata, *, tp_rank=None, pcp_rank=None, dcp_rank=None, pp_rank=None)",
    "PoolKey.build_key_string": "(key_prefix, chunk_hash)",
    "PoolKey.to_string": "(self)",
    "ChunkedTokenDatabase": "(metadata, block_size, hash_block_size=None)",
    "ChunkedTokenDatabase.key_for": "(self, chunk_hash)",
    "ChunkedTokenDatabase.set_kv_caches_base_addr": "(self, kv_caches_base_addr)",
    "ChunkedTokenDatabase.set_block_len": "(self, block_len)",
    "ChunkedTokenDatabase.prepare_value": "(self, start, end, block_ids)",
    "ChunkedTokenDatabase.prepare_values": "(self, chunks, block_ids)",
    "ChunkedTokenDatabase.prepare_value_for_block": "(self, block_id)",
    "ChunkedTokenDatabase.process_tokens": (
        "(self, token_len, block_hashes, mask_num=0, *, chunk_mask=None, put_step=1, put_step_rank=0)"
    ),
    "LoadSpec": "(vllm_cached_tokens, kvpool_cached_tokens, can_load, token_len=0)",
    "RequestTracker": (
        "(req_id, token_len, allocated_block_ids, num_saved_tokens=0, token_ids=None, has_pending_offload=False, "
        "prefill_end_tokens=0)"
    ),
    "RequestTracker.reset": "(self)",
    "RequestTracker.update": "(self, new_block_ids)",
    "ReqMeta": (
        "(req_id, token_len_chunk, block_ids, block_hashes, can_save=None, load_spec=None, is_last_chunk=None, "
        "current_event=None, token_ids=None, num_prompt_tokens=None, partial_tail_offloads=None)"
    ),
    "ReqMeta.from_request_tracker": (
        "(tracker, block_size, load_spec=None, skip_save=False, block_hashes=None, is_last_chunk=None)"
    ),
    "MooncakeStoreConnectorMetadata": "(unfinished_request_ids, preempted_req_ids)",
    "MooncakeStoreConnectorMetadata.add_request": "(self, req_meta)",
}


def named(name: str) -> Any:  # noqa: ANN401 - a class or a function
    found: Any = mooncrate.data
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    signature = inspect.signature(named(name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.parametrize("made", [KeyMetadata, PoolKey, LoadSpec, RequestTracker, ReqMeta])
def test_fields_stand_in_the_order_of_the_arguments(made: Any) -> None:  # noqa: ANN401 - a dataclass
    assert [field.name for field in dataclasses.fields(made)] == list(inspect.signature(made).parameters)


def test_every_name_is_exported() -> None:
    public = {name.split(".")[0] for name in SIGNATURES if not name.startswith("_")}
    assert set(mooncrate.data.__all__) == public | {"_CompactChunkHashList"}
    assert public <= set(vars(mooncrate.data))
    for name in public:
        assert named(name).__doc__


def test_every_public_method_is_documented() -> None:
    for name in SIGNATURES:
        assert inspect.getdoc(named(name)), name


LIGHT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "mooncake"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import mooncrate.data as data
database = data.ChunkedTokenDatabase(data.KeyMetadata("m", 0, 0, 0, 0), 16)
database.set_kv_caches_base_addr([4096]); database.set_block_len([64])
hashes = data.BlobBlockHashes(bytes(64), 32)
chunks = list(database.process_tokens(32, hashes))
assert database.keys_for(hashes) == [database.key_for(chunk_hash) for _, _, chunk_hash in chunks]
assert database.prepare_values(chunks, [0, 1]) == ([[4096], [4160]], [[64], [64]], [0, 1])
tracker = data.RequestTracker("r", 16, ([0],))
assert data.ReqMeta.from_request_tracker(tracker, 16).can_save
heavy = {"torch", "vllm", "mooncake", "numpy", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""


def test_needs_neither_vllm_nor_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


# Pickles and copies

META = KeyMetadata("m", 1, 2, 3, 4, 5, "p")


def step() -> MooncakeStoreConnectorMetadata:
    metadata = MooncakeStoreConnectorMetadata({"r"}, set())
    metadata.add_request(ReqMeta("r", 16, ([1, 2],), [b"hash"], load_spec=LoadSpec(0, 16, can_load=True)))
    return metadata


VALUES: list[Any] = [
    META,
    PoolKey(META, "00ff"),
    LoadSpec(0, 16, can_load=True),
    RequestTracker("r", 16, ([1, 2], [3]), token_ids=[7]),
    ReqMeta("r", 16, ([1, 2],), [b"hash"], partial_tail_offloads=[(0, 1, 2)]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_values_survive_a_pickle(value: Any, protocol: int) -> None:  # noqa: ANN401 - any value
    assert pickle.loads(pickle.dumps(value, protocol)) == value
    assert copy.deepcopy(value) == value


def test_metadata_of_a_step_survives_a_pickle() -> None:
    assert vars(pickle.loads(pickle.dumps(step()))) == vars(step())


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_views_are_not_copied(copied: Callable[[object], object]) -> None:
    for view in (BlobBlockHashes(bytes(64), 32), chunk_hashes_for_block_size([b"0", b"1"], 16, 32)):
        with pytest.raises(TypeError, match="pickle"):
            copied(view)


# Threads

NUM_THREADS = 8
HASHES = made_up_hashes(256, 32)


@pytest.fixture
def _switch_often() -> Any:  # noqa: ANN401 - a generator
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], object]) -> list[object]:
    """What each thread gets, all of them started at the same moment."""
    barrier = threading.Barrier(NUM_THREADS, timeout=60)

    def run(index: int) -> object:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(run, range(NUM_THREADS)))


@pytest.mark.usefixtures("_switch_often")
def test_one_database_and_one_blob_in_many_threads() -> None:
    database = ChunkedTokenDatabase(META, 32, 16)
    database.set_kv_caches_base_addr([2**40 * region for region in range(8)])
    database.set_block_len([4_096])
    blob = BlobBlockHashes(bytearray(b"".join(HASHES)), 32)
    view = chunk_hashes_for_block_size(blob, 16, 32)
    chunks = [(start, start + 32) for start in range(0, 4_096, 32)]
    block_ids = [(index * 251) % 128 for index in range(128)]

    def work(index: int) -> object:
        results: list[object] = []
        for _ in range(5):
            yielded = list(database.process_tokens(4_096, blob, put_step=NUM_THREADS, put_step_rank=index))
            results.append([(start, end, bytes(chunk_hash)) for start, end, chunk_hash in yielded])
            results.append(database.keys_for(blob))
            results.append(database.keys_for(view))
            results.append(database.prepare_values(chunks, block_ids))
            results.append([database.prepare_value_for_block(block_id) for block_id in block_ids])
            results.append([bytes(one) for one in view] + [bytes(one) for one in blob[::-1]])
        return results

    alone = [work(index) for index in range(NUM_THREADS)]
    assert in_threads(work) == alone


@pytest.mark.usefixtures("_switch_often")
def test_regions_that_are_set_while_others_read_them() -> None:
    """Every answer is one of the two that were set, never a mixture."""
    database = ChunkedTokenDatabase(META, 16)
    database.set_block_len([64])
    answers = [([base + 128], [64]) for base in (4_096, 2**63)]

    def work(index: int) -> object:
        found = []
        for turn in range(300):
            if index == 0:
                database.set_kv_caches_base_addr([(4_096, 2**63)[turn % 2]])
            else:
                found.append(database.prepare_value_for_block(2))
        return found

    database.set_kv_caches_base_addr([4_096])
    for found in in_threads(work):
        assert isinstance(found, list)
        assert all(answer in answers for answer in found)


@pytest.mark.usefixtures("_switch_often")
def test_views_are_dropped_while_others_read_the_same_blob() -> None:
    blob = bytearray(b"".join(HASHES))

    def work(_: int) -> object:
        return [bytes(BlobBlockHashes(blob, 32)[index]) for index in range(len(HASHES))]

    assert in_threads(work) == [HASHES] * NUM_THREADS
    blob.extend(b"nothing holds it now")
