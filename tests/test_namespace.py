"""The fingerprint in front of keys: what it says, and that no two deployments share one by accident."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncrate import CacheGroup, KVPool, Namespace, RankTopology
from mooncrate.errors import LayoutError
from mooncrate.keyspace import KeySpace
from mooncrate.kv_caches import describe_kv_caches
from mooncrate.memory_store import MemoryStore
from mooncrate.namespace import escape
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


def text_of(layers: Mapping[str, torch.Tensor | list[torch.Tensor]], num_blocks: int = 100, **said: int) -> str:
    return describe_kv_caches(layers, num_blocks, **said).text


def test_layouts_that_order_numbers_differently_have_different_names() -> None:
    nhd = torch.zeros(100, 2, 16, 8, 4)
    hnd = torch.zeros(100, 2, 8, 16, 4).transpose(2, 3)
    split = torch.zeros(2, 100, 16, 8, 4)
    blocks = torch.zeros(100, 2 * 16 * 8 * 4)
    texts = [text_of({"0": tensor}) for tensor in (nhd, hnd, split, blocks)]
    assert texts == ["1x[n*2*16*8*4]", "1x[n*2*8*16*4:0.1.3.2.4]", "1x[2*n*16*8*4]", "1x[n*1024]"]
    assert text_of({"0": nhd, "1": nhd, "2": [split, blocks]}) == "2x[n*2*16*8*4]+1x[2*n*16*8*4]+1x[n*1024]"
    halves = {"0": nhd, "1": nhd.half()}
    assert text_of(halves) == "1x[n*2*16*8*4:float32]+1x[n*2*16*8*4:float16]"
    assert describe_kv_caches(halves, 100).dtype == "float32+float16"


@pytest.mark.parametrize("num_blocks", [3, 16, 100])
def test_the_number_of_blocks_is_no_part_of_a_layout(num_blocks: int) -> None:
    texts = [
        text_of({"0": torch.zeros(num_blocks, 16, 5)}, num_blocks, block_dim=0),
        text_of({"0": torch.zeros(num_blocks * 2, 8, 5)}, num_blocks, block_dim=0),
        text_of({"0": torch.zeros(num_blocks * 80)}, num_blocks),
        text_of({"0": torch.zeros(2, num_blocks, 40)}, num_blocks, block_dim=1),
        text_of({"0": torch.zeros(num_blocks, 1, 16, 5).transpose(0, 1)}, num_blocks, block_dim=1),
    ]
    assert texts == ["1x[n*16*5]", "1x[n*2*8*5]", "1x[n*80]", "1x[2*n*40]", "1x[n*16*5]"]


def test_stages_of_a_pipeline_with_layers_of_their_own_have_one_text() -> None:
    stages = [{f"layers.{number}.attn": torch.zeros(8, 16) for number in range(start, start + 4)} for start in (0, 8)]
    assert [text_of(stage, 8) for stage in stages] == ["4x[n*16]"] * 2  # 8 to 11: 10 comes after 9


INNER = (2, 3, 2)
LAYERS = ("layers.2", "layers.10", "k")


@st.composite
def deployments(draw: st.DrawFn) -> tuple[str, bytes]:
    """Three layers of one logical content, laid out somehow: the text, and the object of one block."""
    num_blocks, axis = draw(st.integers(2, 5)), draw(st.integers(0, 3))
    shape = (*INNER[:axis], num_blocks, *INNER[axis:])
    order = draw(st.sampled_from([(0, 1, 2, 3), (3, 2, 1, 0), (axis, *(one for one in range(4) if one != axis))]))
    places = draw(st.permutations(range(3)))
    form = draw(st.sampled_from(["apart", "slots", "innermost"]))
    memory_shape = [shape[one] for one in order]
    stacked_at = {"apart": 0, "slots": 1, "innermost": 4}[form]
    memory = torch.zeros([*memory_shape[:stacked_at], 3, *memory_shape[stacked_at:]], dtype=torch.int16)
    block_id = draw(st.integers(0, num_blocks - 1))
    layers = {}
    for name, place in draw(st.permutations(list(zip(LAYERS, places, strict=True)))):
        tensor = memory.select(stacked_at, place).permute([order.index(one) for one in range(4)])
        assert tensor.shape == shape
        logical = torch.arange(12, dtype=torch.int16).view(INNER) + 1 + 100 * LAYERS.index(name)
        tensor.select(axis, block_id).copy_(logical)
        layers[name] = tensor
    layout = describe_kv_caches(layers, num_blocks, block_dim=axis)
    raw, start = memory.view(-1).view(torch.uint8).numpy().tobytes(), memory.data_ptr()
    begins = [(base - start + block_id * stride, num_bytes) for base, stride, num_bytes in layout.regions]
    return layout.text, b"".join(raw[begin : begin + num_bytes] for begin, num_bytes in begins)


@given(st.lists(deployments(), min_size=6, max_size=6))
def test_rule_2_equal_texts_mean_equal_objects(drawn: list[tuple[str, bytes]]) -> None:
    objects: dict[str, bytes] = {}
    for text, payload in drawn:
        assert objects.setdefault(text, payload) == payload


def test_rule_2_swapped_layers_are_swapped_objects_under_other_keys() -> None:
    one, other = torch.zeros(8, 10), torch.zeros(8, 10)
    slots = torch.zeros(8, 2, 10)
    caches = [
        {"a": one, "b": other},
        {"b": other, "a": one},
        {"a": slots[:, 0], "b": slots[:, 1]},
        {"b": slots[:, 1], "a": slots[:, 0]},
        {"a": slots[:, 1], "b": slots[:, 0]},
    ]
    texts = [text_of(layers, 8) for layers in caches]
    assert texts[0] == texts[2] == texts[3] == "2x[n*10]"
    assert texts[1] == texts[4] != texts[0]
    hashes = prompt("swapped", 2)
    with MemoryStore() as store:
        hits = []
        for layers in caches:
            pool = KVPool.open(model_name="m", groups=[FULL], store=store, namespace=Namespace())
            pool.register_kv_caches(layers, 8)
            hits.append(pool.lookup(33, hashes))
            pool.save(to_save(hashes, [[1, 2]], 32)).result()
            pool.close()
    assert hits == [0, 0, 32, 32, 32]


def test_unlike_pipeline_stages_can_be_given_one_fingerprint() -> None:
    hashes = prompt("stages", 2)
    same = Namespace(block_bytes=4096, layout="llama")
    with MemoryStore() as store:
        stages = [
            KVPool.open(
                model_name="m",
                groups=[FULL],
                store=store,
                namespace=same,
                topology=RankTopology(pp_rank=rank, pp_size=2),
            )
            for rank in range(2)
        ]
        for rank, pool in enumerate(stages):
            pool.register_kv_caches({str(layer): torch.zeros(8, 16) for layer in range(3 + rank)}, 8, block_dim=0)
            assert pool.save(to_save(hashes, [[1, 2]], 32)).result().num_saved == 2
        assert [pool.lookup(33, hashes) for pool in stages] == [32, 32]
        for pool in stages:
            pool.close()


def test_groups_have_fingerprints_of_their_own() -> None:
    groups = (FULL, CacheGroup.full_attention(32))
    keys = key_space(Namespace("t", None, (1, 2), ("a", "b")), groups=groups)
    prefixes = list(itertools.chain.from_iterable(prefixes for prefixes, _ in keys.lookup_groups()))
    assert [
        "block_size=16,block_bytes=1,layout=a" in prefixes[0],
        "block_size=32,block_bytes=2,layout=b" in prefixes[1],
    ]
