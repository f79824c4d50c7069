"""Proof 3: two engines of ours on one pool, one that produces and one that consumes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine_process import EngineProcess
from fleet import MODELS, NUM_GENERATED, Fleet, Model, assert_idle, assert_same_answer, case_name, prompt_of

pytestmark = [pytest.mark.vllm_version("0.32.0"), pytest.mark.timeout(600)]

Pair = tuple[Model, EngineProcess, EngineProcess]


@pytest.fixture(scope="module", params=MODELS, ids=case_name)
def pair(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model, and its producer and its consumer."""
    model: Model = request.param
    with ExitStack() as stack:
        engines = []
        for role in ("kv_producer", "kv_consumer"):
            engine = fleet.start(model, role, model.settings.with_our_connector(kv_role=role))
            stack.callback(engine.close)
            stack.callback(engine.end)
            engines.append(engine)
        producer, consumer = engines
        producer.wait_until_ready()
        consumer.wait_until_ready()
        yield model, producer, consumer


def test_the_consumer_loads_what_the_producer_saved(fleet: Fleet, pair: Pair) -> None:
    model, producer, consumer = pair
    plain = fleet.plain_answer(model)
    fleet.pool.clear()
    for engine in (producer, consumer):
        engine.reset_prefix_cache()
    cold = producer.generate(model.prompt, NUM_GENERATED)
    saved = fleet.pool.objects()
    warm = consumer.generate(model.prompt, NUM_GENERATED)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, model.num_hit_tokens)
    assert_same_answer(cold, plain)
    assert_same_answer(warm, plain)
    assert len(saved) >= model.num_hit_tokens // 128
    assert fleet.pool.objects() == saved


def test_the_consumer_saves_nothing(fleet: Fleet, pair: Pair) -> None:
    model, _, consumer = pair
    prompt = prompt_of(model.num_prompt_tokens, seed=1)
    fleet.pool.clear()
    consumer.reset_prefix_cache()
    assert_same_answer(consumer.generate(prompt, NUM_GENERATED), fleet.plain_answer(model, prompt))
    assert fleet.pool.keys() == set()


def test_the_producer_finds_what_it_saved(fleet: Fleet, pair: Pair) -> None:
    """As that of vLLM's own connector does: a producer computes nothing twice."""
    model, producer, _ = pair
    fleet.pool.clear()
    for num_hit_tokens in (0, model.num_hit_tokens):
        producer.reset_prefix_cache()
        answer = producer.generate(model.prompt, NUM_GENERATED)
        assert answer.num_cached_tokens == num_hit_tokens
        assert_same_answer(answer, fleet.plain_answer(model))


def test_nothing_is_held_afterwards(pair: Pair) -> None:
    _, producer, consumer = pair
    for engine in (producer, consumer):
        assert_idle(engine.state())
