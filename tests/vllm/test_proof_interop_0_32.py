"""Proof 2: vLLM's own connector and ours share a pool: the same keys, the same bytes, and either loads the other's.

A fleet can be moved over engine by engine, and back. What is in the pool is read by a client of Mooncake's own.
"""

import hashlib
from typing import Final

import pytest

from engine_process import EngineProcess
from fleet import (
    GEMMA,
    LLAMA,
    MODELS,
    NUM_GENERATED,
    OURS,
    REFERENCE,
    Fleet,
    Model,
    assert_same_answer,
    case_name,
    prompt_of,
)

pytestmark = [pytest.mark.vllm_version("0.32.0"), pytest.mark.timeout(600)]

KEY_START: Final = "@tp_rank:0@pcp0@dcp0@pp_rank:0@group:"


def saved_by(engine: EngineProcess, fleet: Fleet, prompt: list[int]) -> dict[str, str]:
    """Serve a prompt into an empty pool; return a short digest of every object, so that a difference can be read."""
    fleet.pool.clear()
    engine.reset_prefix_cache()
    engine.generate(prompt, NUM_GENERATED)
    return {key: hashlib.sha256(value).hexdigest() for key, value in fleet.pool.objects().items()}


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [(LLAMA, number) for number in (1, 127, 128, 129, 256, 700, 1000)]
    + [(GEMMA, number) for number in (127, 128, 256, 257, 400, 640, 1024, 1100)],
    ids=case_name,
)
def test_both_save_the_same_bytes_under_the_same_keys(fleet: Fleet, model: Model, num_tokens: int) -> None:
    reference, ours = (
        saved_by(engine, fleet, prompt_of(num_tokens)) for engine in fleet.engines(model, REFERENCE, OURS)
    )
    assert set(ours) == set(reference)
    assert ours == reference
    # Neither is empty where there is a whole block; every group has its part where a prompt that comes again can hit.
    groups = {key.partition(f"{model.name}{KEY_START}")[2].partition("@")[0] for key in ours}
    num_groups = (num_tokens >= 128) + (num_tokens > 128) * (model.num_groups - 1)
    assert len(groups) == num_groups


@pytest.mark.parametrize(("writer", "reader"), [(REFERENCE, OURS), (OURS, REFERENCE)])
@pytest.mark.parametrize("model", MODELS, ids=case_name)
def test_either_loads_what_the_other_saved(fleet: Fleet, model: Model, writer: str, reader: str) -> None:
    plain = fleet.plain_answer(model)
    writing, reading = fleet.engines(model, writer, reader)
    saved = saved_by(writing, fleet, model.prompt)
    reading.reset_prefix_cache()
    answer = reading.generate(model.prompt, NUM_GENERATED)
    assert answer.num_cached_tokens == model.num_hit_tokens
    assert_same_answer(answer, plain)
    assert fleet.pool.keys() == set(saved)


@pytest.mark.parametrize(("first", "second"), [(REFERENCE, OURS), (OURS, REFERENCE)])
@pytest.mark.parametrize("model", MODELS, ids=case_name)
def test_either_goes_on_where_the_other_stopped(fleet: Fleet, model: Model, first: str, second: str) -> None:
    """A prompt whose beginning the other one saved: that is loaded, and only what follows is saved."""
    longer = model.prompt
    shorter = longer[: model.num_hit_tokens // 2 + 1]
    plain = fleet.plain_answer(model)
    one, other = fleet.engines(model, first, second)
    whole = saved_by(other, fleet, longer)
    begun = saved_by(one, fleet, shorter)
    other.reset_prefix_cache()
    answer = other.generate(longer, NUM_GENERATED)
    assert answer.num_cached_tokens == model.num_hit_tokens // 2 // 128 * 128
    assert answer.token_ids == plain.token_ids
    assert fleet.pool.keys() == set(whole) | set(begun)
