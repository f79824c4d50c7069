"""Proof 1: a prompt comes twice, and the second time it is served from the pool with the same answer.

Log-probabilities are compared with ``==``: the engines compute in the same pieces, because the step limit makes a cold
prefill stop where a warm one starts (`engine_settings`).
"""

import math
from dataclasses import dataclass
from typing import Final

import pytest

from checkpoint import VOCAB_SIZE
from engine_process import EngineProcess, Generation
from fleet import (
    BLOCK_SIZE,
    GEMMA,
    LLAMA,
    MODELS,
    NUM_GENERATED,
    OURS,
    REFERENCE,
    TOLERANCE,
    Fleet,
    Model,
    assert_same_answer,
    case_name,
    distance,
    prompt_of,
)
from mooncake_pool import MooncakePool

pytestmark = [pytest.mark.vllm_version("0.32.0"), pytest.mark.timeout(600)]

CONNECTORS: Final = (REFERENCE, OURS)


@dataclass(frozen=True)
class Run:
    """One prompt through one engine twice: into an empty pool, then out of it."""

    engine: EngineProcess
    cold: Generation
    warm: Generation
    objects: dict[str, bytes]
    objects_after_warm: dict[str, bytes]


def run_twice(engine: EngineProcess, pool: MooncakePool, prompt: list[int]) -> Run:
    """Serve a prompt from nothing, then once more with only the pool to remember it."""
    pool.clear()
    engine.reset_prefix_cache()
    cold = engine.generate(prompt, NUM_GENERATED, score_prompt=True)
    objects = pool.objects()
    engine.reset_prefix_cache()
    warm = engine.generate(prompt, NUM_GENERATED)
    return Run(engine, cold, warm, objects, pool.objects())


@pytest.fixture(scope="module", params=[(model, kind) for model in MODELS for kind in CONNECTORS], ids=case_name)
def case(fleet: Fleet, request: pytest.FixtureRequest) -> tuple[Model, Run]:
    """A model, and its prompt through an engine with a connector."""
    model, kind = request.param
    (engine,) = fleet.engines(model, kind)
    return model, run_twice(engine, fleet.pool, model.prompt)


def test_the_second_request_is_served_from_the_pool(case: tuple[Model, Run]) -> None:
    model, run = case
    assert (run.cold.num_cached_tokens, run.warm.num_cached_tokens) == (0, model.num_hit_tokens)
    assert run.objects
    assert run.objects_after_warm == run.objects  # a hit writes nothing


def test_the_answer_is_that_of_an_engine_without_a_connector(fleet: Fleet, case: tuple[Model, Run]) -> None:
    """Of the whole vocabulary, for every generated token, and of the prompt."""
    model, run = case
    plain = fleet.plain_answer(model)
    assert [len(step) for step in plain.log_probs] == [VOCAB_SIZE] * NUM_GENERATED
    assert len(plain.prompt_log_probs) == model.num_prompt_tokens - 1
    assert all(math.isfinite(value) for step in plain.log_probs for value in step)
    assert_same_answer(run.cold, plain)
    assert_same_answer(run.warm, plain)
    assert run.cold.prompt_log_probs == plain.prompt_log_probs


@pytest.mark.parametrize(
    ("model", "num_tokens"),
    [(LLAMA, number) for number in (1, 127, 128, 129, 256, 257, 641)]
    + [(GEMMA, number) for number in (128, 129, 257, 385, 1024, 1025)],
    ids=case_name,
)
@pytest.mark.parametrize("kind", CONNECTORS)
def test_lengths_around_the_block_size(fleet: Fleet, model: Model, num_tokens: int, kind: str) -> None:
    """A prompt of exactly n blocks hits n - 1, so that a token is left to compute; vLLM's connector says the same."""
    prompt = prompt_of(num_tokens)
    (engine,) = fleet.engines(model, kind)
    run = run_twice(engine, fleet.pool, prompt)
    assert run.warm.num_cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert run.cold.token_ids == run.warm.token_ids == fleet.plain_answer(model, prompt).token_ids


def test_one_wrong_object_changes_the_answer(fleet: Fleet, case: tuple[Model, Run]) -> None:
    """The comparisons above would see it: of every group, one object after the other with the bytes of another chunk.

    The bytes are those of a real chunk of the same group, so the answer stays finite and only their place is wrong.
    """
    model, run = case
    plain, objects = fleet.plain_answer(model), run.objects
    for group_id in range(model.num_groups):
        keys = sorted(key for key in objects if f"@group:{group_id}@" in key)
        assert len(keys) > 1
        seen = 0
        for index, key in enumerate(keys):
            fleet.pool.clear()
            for name, value in objects.items():
                fleet.pool.put(name, objects[keys[index - 1]] if name == key else value)
            run.engine.reset_prefix_cache()
            answer = run.engine.generate(model.prompt, NUM_GENERATED)
            assert answer.num_cached_tokens == model.num_hit_tokens
            assert all(math.isfinite(value) for step in answer.log_probs for value in step)
            seen += distance(answer, plain) > 100 * TOLERANCE
        # A sliding window of 256 tokens ends in the last two chunks, and nothing before them is loaded.
        num_loaded = len(keys) if len(keys) * BLOCK_SIZE == model.num_hit_tokens else 2
        assert seen >= num_loaded, f"group {group_id}"
