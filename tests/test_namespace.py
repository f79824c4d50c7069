"""The fingerprint in front of keys: what it says, and that no two deployments share one by accident."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncrate import CacheGroup, KVPool, Namespace, RankTopology
from mooncrate.errors import LayoutError
from mooncrate.keyspace import KeySpace
from mooncrate.memory_store import MemoryStore
from mooncrate.namespace import describe_dtype, describe_layout, escape
from toy_engine import ToyEngine, prompt, to_load, to_save

FULL = CacheGroup.full_attention(16)
TEXTS = st.text(st.sampled_from("xy@%(),=0/é "), max_size=4)
NAMESPACES = st.builds(
    Namespace,
    kv_dtype=TEXTS,
    block_bytes=st.integers(1, 3),
    layout=TEXTS,
    model_revision=st.none() | TEXTS,
    hash_algorithm=st.none() | TEXTS,
)


def key_space(
    namespace: Namespace | None, model_name: str = "m", cache_prefix: str = "", groups: tuple[CacheGroup, ...] = (FULL,)
) -> KeySpace:
    return KeySpace(model_name, groups, RankTopology(), 16, cache_prefix, namespace)


def prefix(namespace: Namespace, model_name: str = "m", cache_prefix: str = "") -> str:
    ((prefixes, _),) = key_space(namespace, model_name, cache_prefix).lookup_groups()
    return prefixes[0]


def test_rule_3_the_fingerprint_is_readable_and_complete() -> None:
    namespace = Namespace("bfloat16", 16, 65536, "2x[n*16*8*128]", 1, 1, "main", "sha256")
    assert prefix(namespace, "meta-llama/Llama-3") == (
        "(kv_dtype=bfloat16,block_size=16,block_bytes=65536,layout=2x%5Bn*16*8*128%5D,tp_size=1,pp_size=1,"
        "model_revision=main,hash_algorithm=sha256)@meta-llama/Llama-3@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
    )


def test_rule_3_two_ways_to_cut_one_text_give_two_keys() -> None:
    namespace = Namespace("t", None, 1, "l")
    cuts = [("x", "y@z"), ("x@y", "z"), ("", "x@y@z"), ("x", "y%40z"), ("x%40y", "z")]
    assert len({prefix(namespace, model_name, start) for start, model_name in cuts}) == len(cuts)
    values = [("a,layout=b", "c"), ("a", "b,layout=c"), ("a%2Clayout=b", "c")]
    assert len({prefix(Namespace(kv_dtype, None, 1, layout)) for kv_dtype, layout in values}) == len(values)


@given(st.tuples(NAMESPACES, TEXTS, TEXTS), st.tuples(NAMESPACES, TEXTS, TEXTS))
def test_rule_3_different_fields_never_give_one_key(
    one: tuple[Namespace, str, str], other: tuple[Namespace, str, str]
) -> None:
    assert (prefix(*one) == prefix(*other)) == (one == other)


@given(st.text(), st.text())
def test_rule_3_escaping_keeps_texts_apart(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)
    assert not set("@(),=% ") & set(escape(one).replace("%", ""))


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "fp8"},
        {"block_bytes": 2},
        {"layout": "other"},
        {"model_revision": "main"},
        {"model_revision": ""},
        {"hash_algorithm": "sha256"},
    ],
)
def test_rule_2_every_field_changes_every_key(change: dict[str, str]) -> None:
    base = {"kv_dtype": "t", "block_bytes": 1, "layout": "l"}
    assert prefix(Namespace(**base)) != prefix(Namespace(**{**base, **change}))  # type: ignore[arg-type]


def test_what_is_not_given_is_filled_in(caplog: pytest.LogCaptureFixture) -> None:
    engine = ToyEngine([FULL, CacheGroup.recurrent(32)], block_bytes=96)
    with MemoryStore() as store, caplog.at_level("INFO", "mooncrate"):
        pool = KVPool.open(model_name="m", groups=engine.groups, store=store, namespace=Namespace(kv_dtype="fp8_e4m3"))
        assert pool.namespace == Namespace("fp8_e4m3", (16, 32), tp_size=1, pp_size=1)
        engine.register(pool)
        assert pool.namespace == Namespace("fp8_e4m3", (16, 32), 192, "2x[n*96]", 1, 1)
        pool.close()
    opened, registered = [record.message for record in caplog.records if "identified by" in record.message]
    assert "block_bytes and layout to come with the tensors" in opened
    assert "block_size=32,block_bytes=192" in registered


def test_a_pool_that_only_looks_up_has_to_be_given_what_tensors_would_tell() -> None:
    engine, hashes = ToyEngine([FULL]), prompt("only", 2)
    with MemoryStore() as store:
        pool = KVPool.open(model_name="m", groups=[FULL], store=store, namespace=Namespace(model_revision="r1"))
        with pytest.raises(LayoutError, match=r"kv_dtype, block_bytes, layout.*register"):
            pool.lookup(33, hashes)
        with pytest.raises(LayoutError, match="kv_dtype, block_bytes, layout"):
            pool.reset()
        engine.register(pool)
        assert pool.save(to_save(hashes, [[1, 2]], 32)).result().num_saved == 2
        router = KVPool.open(model_name="m", groups=[FULL], store=store, namespace=pool.namespace)
        plain = KVPool.open(model_name="m", groups=[FULL], store=store)
        assert [one.lookup(33, hashes) for one in (pool, router, plain)] == [32, 32, 0]
        assert pool.load(to_load(hashes, [[3, 4]], 32)).result().num_tokens == 32
        assert (plain.reset(), router.reset()) == (0, 2)
        for one in (pool, router, plain):
            one.close()


def test_block_bytes_that_are_not_so_are_refused() -> None:
    with MemoryStore() as store:
        pool = KVPool.open(model_name="m", groups=[FULL], store=store, namespace=Namespace(block_bytes=100))
        with pytest.raises(LayoutError, match="block_bytes is 100, but it was found to be 192"):
            ToyEngine([FULL]).register(pool)
        pool.close()


@pytest.mark.parametrize(
    "values", [{"block_size": 0}, {"block_bytes": True}, {"tp_size": "2"}, {"kv_dtype": 8}, {"layout": ("a", 1)}]
)
def test_values_of_the_wrong_kind_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        Namespace(**values)  # type: ignore[arg-type]


def test_layouts_that_order_numbers_differently_have_different_names() -> None:
    nhd = torch.zeros(100, 2, 16, 8, 4)
    hnd = torch.zeros(100, 2, 8, 16, 4).transpose(2, 3)
    split = torch.zeros(2, 100, 16, 8, 4)
    blocks = torch.zeros(100, 2 * 16 * 8 * 4)
    names = [describe_layout({"0": tensor}, 100) for tensor in (nhd, hnd, split, blocks)]
    assert names == ["1x[n*2*16*8*4]", "1x[n*2*8*16*4:0.1.3.2.4]", "1x[2*n*16*8*4]", "1x[n*1024]"]
    assert (
        describe_layout({"0": nhd, "1": nhd, "2": [split, blocks]}, 100) == "2x[n*2*16*8*4]+1x[2*n*16*8*4]+1x[n*1024]"
    )
    assert describe_dtype({"0": nhd, "1": nhd.half()}) == "float32+float16"


def test_the_number_of_blocks_is_not_part_of_a_layout() -> None:
    names = {describe_layout({"0": torch.zeros(num, 16, 8)}, num) for num in (10, 100, 1000)}
    assert names == {"1x[n*16*8]"}


def test_groups_have_fingerprints_of_their_own() -> None:
    groups = (FULL, CacheGroup.full_attention(32))
    keys = key_space(Namespace("t", None, (1, 2), ("a", "b")), groups=groups)
    prefixes = list(itertools.chain.from_iterable(prefixes for prefixes, _ in keys.lookup_groups()))
    assert [
        "block_size=16,block_bytes=1,layout=a" in prefixes[0],
        "block_size=32,block_bytes=2,layout=b" in prefixes[1],
    ]
