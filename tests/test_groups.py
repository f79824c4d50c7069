"""Groups and ranks: what they refuse, and that all ranks together save every chunk exactly once."""

import itertools
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncrate.errors import LayoutError
from mooncrate.groups import CacheGroup, GroupKind, RankNamespace, RankTopology

REPLICAS = [(tp_size, r) for tp_size in range(1, 17) for r in range(1, tp_size + 1) if tp_size % r == 0]
NOT_REPLICAS = [(tp_size, r) for tp_size in range(1, 17) for r in range(1, 2 * tp_size + 1) if tp_size % r]
every_split = pytest.mark.parametrize(("tp_size", "replicas"), REPLICAS)


def test_constructors() -> None:
    full = CacheGroup.full_attention(16, tp_replicas=2)
    assert (full.kind, full.block_size, full.window, full.tp_replicas) == (GroupKind.FULL_ATTENTION, 16, None, 2)
    sliding = CacheGroup.sliding_window(32, 128)
    assert (sliding.kind, sliding.block_size, sliding.window, sliding.tp_replicas) == ("sliding_window", 32, 128, 1)
    recurrent = CacheGroup.recurrent(block_size=512, tp_replicas=4)
    assert (recurrent.kind, recurrent.block_size, recurrent.window, recurrent.tp_replicas) == (
        "recurrent",
        512,
        None,
        4,
    )


def test_groups_are_values() -> None:
    group = CacheGroup.sliding_window(16, 128)
    assert group == CacheGroup("sliding_window", 16, 128)  # type: ignore[arg-type]
    assert CacheGroup("sliding_window", 16, 128).kind is GroupKind.SLIDING_WINDOW  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(group)) == group
    assert len({group, replace(group), replace(group, window=64)}) == 2
    with pytest.raises(FrozenInstanceError):
        group.block_size = 32  # type: ignore[misc]


def test_kinds_are_the_text_that_the_core_reads() -> None:
    assert [str(kind) for kind in GroupKind] == ["full_attention", "sliding_window", "recurrent"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size is 0, less than 1"),
        ({"block_size": -16}, "block_size is -16, less than 1"),
        ({"block_size": True}, "block_size is True, which is not an integer"),
        ({"block_size": 16.0}, "block_size is 16.0, which is not an integer"),
        ({"block_size": "16"}, "block_size is '16', which is not an integer"),
        ({"tp_replicas": 0}, "tp_replicas is 0, less than 1"),
        ({"tp_replicas": -2}, "tp_replicas is -2, less than 1"),
        ({"tp_replicas": True}, "tp_replicas is True, which is not an integer"),
        ({"window": 128}, "window is 128, but a group of kind full_attention has no window"),
        ({"kind": "recurrent", "window": 0}, "window is 0, but a group of kind recurrent has no window"),
        ({"kind": "sliding_window"}, "window is None, which is not an integer"),
        ({"kind": "sliding_window", "window": 0}, "window is 0, less than 1"),
        ({"kind": "sliding_window", "window": True}, "window is True, which is not an integer"),
        ({"kind": "mamba"}, "'mamba' is not one of the group kinds"),
    ],
)
def test_groups_refuse(arguments: dict[str, Any], message: str) -> None:
    complete: dict[str, Any] = {"kind": "full_attention", "block_size": 16} | arguments
    with pytest.raises(LayoutError) as caught:
        CacheGroup(**complete)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0, less than 1"),
        ({"pp_size": -1}, "pp_size is -1, less than 1"),
        ({"pcp_size": True}, "pcp_size is True, which is not an integer"),
        ({"dcp_size": 2.0}, "dcp_size is 2.0, which is not an integer"),
        ({"tp_rank": -1}, "tp_rank is -1, less than 0"),
        ({"tp_rank": False}, "tp_rank is False, which is not an integer"),
        ({"tp_rank": 1}, "tp_rank 1 is not below tp_size 1"),
        ({"pp_rank": 4, "pp_size": 4}, "pp_rank 4 is not below pp_size 4"),
        ({"pcp_rank": 3, "pcp_size": 2}, "pcp_rank 3 is not below pcp_size 2"),
        ({"tp_size": 4, "dcp_rank": 2, "dcp_size": 2}, "dcp_rank 2 is not below dcp_size 2"),
        ({"tp_size": 4, "dcp_size": 3}, "4 tensor-parallel x 1 prefill-context-parallel ranks cannot be divided"),
        ({"tp_rank": 3, "tp_size": 4, "dcp_size": 2}, "dcp_rank is 0, but with dcp_size 2 it is 1 at tp_rank 3"),
    ],
)
def test_topologies_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        RankTopology(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(("tp_size", "replicas"), NOT_REPLICAS)
def test_replicas_that_do_not_divide_the_ranks_are_refused(tp_size: int, replicas: int) -> None:
    topology, group = RankTopology(tp_size=tp_size), CacheGroup.full_attention(16, tp_replicas=replicas)
    for method in (
        topology.key_tp_rank,
        topology.put_step,
        topology.put_step_rank,
        topology.own_ranks,
        topology.lookup_ranks,
    ):
        with pytest.raises(LayoutError, match=f"{tp_size} tensor-parallel ranks .* {replicas} replicas"):
            method(group)


def test_replicas_under_decode_context_parallelism_are_refused() -> None:
    topology = RankTopology(tp_size=4, dcp_size=2)
    with pytest.raises(LayoutError, match="2 replicas per shard with dcp_size 2"):
        topology.key_tp_rank(CacheGroup.full_attention(16, tp_replicas=2))


@every_split
def test_all_ranks_together_save_every_chunk_of_every_shard_once(tp_size: int, replicas: int) -> None:
    group, num_chunks = CacheGroup.full_attention(16, tp_replicas=replicas), 53
    for group_id in range(4):
        saved: Counter[tuple[RankNamespace, int]] = Counter()
        for tp_rank in range(tp_size):
            topology = RankTopology(tp_rank=tp_rank, tp_size=tp_size)
            step, remainder = topology.put_step(group), topology.put_step_rank(group, group_id)
            assert remainder < step
            saved.update((topology.own_ranks(group), chunk) for chunk in range(num_chunks) if chunk % step == remainder)
        wanted = itertools.product(RankTopology(tp_size=tp_size).lookup_ranks(group), range(num_chunks))
        assert saved == Counter(wanted)


@every_split
def test_shards_are_numbered_without_gaps(tp_size: int, replicas: int) -> None:
    group = CacheGroup.recurrent(16, tp_replicas=replicas)
    shards = [RankTopology(tp_rank=rank, tp_size=tp_size).key_tp_rank(group) for rank in range(tp_size)]
    assert shards == sorted(shards)
    assert Counter(shards) == dict.fromkeys(range(tp_size // replicas), replicas)


@settings(deadline=None)  # on a busy machine any example may take long
@given(st.data())
def test_what_ranks_save_is_what_each_of_them_looks_up(data: st.DataObject) -> None:
    tp_size, pp_size, pcp_size = (data.draw(st.integers(1, most)) for most in (16, 3, 3))
    num_ranks = tp_size * pcp_size
    dcp_size = data.draw(st.sampled_from([n for n in range(1, num_ranks + 1) if num_ranks % n == 0]))
    divisors = [n for n in range(1, tp_size + 1) if tp_size % n == 0] if dcp_size == 1 else [1]
    group = CacheGroup.sliding_window(16, 64, tp_replicas=data.draw(st.sampled_from(divisors)))
    topologies = [
        RankTopology(tp, tp_size, pp, pp_size, pcp, pcp_size, (tp * pcp_size + pcp) % dcp_size, dcp_size)
        for tp, pp, pcp in itertools.product(range(tp_size), range(pp_size), range(pcp_size))
    ]
    looked_up = {topology.lookup_ranks(group) for topology in topologies}
    assert len(looked_up) == 1
    (namespaces,) = looked_up
    assert len(set(namespaces)) == len(namespaces)
    assert set(namespaces) == {topology.own_ranks(group) for topology in topologies}


@pytest.mark.parametrize(
    ("topology", "replicas", "expected"),
    [
        (RankTopology(), 1, [(0, 0, 0, 0)]),
        (RankTopology(1, 2, 1, 2), 1, [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]),
        (RankTopology(5, 8), 4, [(0, 0, 0, 0), (1, 0, 0, 0)]),
        (RankTopology(3, 8), 8, [(0, 0, 0, 0)]),
        (RankTopology(tp_size=2, pcp_size=2), 1, [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]),
        (RankTopology(tp_size=4, dcp_size=2), 1, [(0, 0, 0, 0), (1, 0, 1, 0), (2, 0, 0, 0), (3, 0, 1, 0)]),
        (RankTopology(pcp_size=2, dcp_size=2), 1, [(0, 0, 0, 0), (0, 1, 1, 0)]),
    ],
)
def test_namespaces_in_the_order_of_the_reference(
    topology: RankTopology, replicas: int, expected: list[tuple[int, int, int, int]]
) -> None:
    assert list(topology.lookup_ranks(CacheGroup.full_attention(16, tp_replicas=replicas))) == expected


def test_first_chunks_of_groups_fall_to_different_ranks() -> None:
    topology, group = RankTopology(tp_rank=1, tp_size=4), CacheGroup.full_attention(16, tp_replicas=4)
    assert [topology.put_step_rank(group, group_id) for group_id in range(5)] == [1, 2, 3, 0, 1]
    with pytest.raises(LayoutError, match="group_id is -1"):
        topology.put_step_rank(group, -1)
