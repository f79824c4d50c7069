"""Proof 5: 64 prompts at once, more than the KV cache holds, so that requests are preempted and come back.

Their answers are those of an engine without a connector, whose cache has room for all; and when the last request is
done, nothing is left: no reference on a block, no request, no job.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import pytest

from engine_process import EngineProcess, Generation
from fleet import LLAMA, OURS, PLAIN, REFERENCE, Fleet, assert_close_answer, assert_idle, prompt_of

pytestmark = [pytest.mark.vllm_version("0.32.0"), pytest.mark.timeout(600)]

NUM_PREFIXES: Final = 8
NUM_PER_PREFIX: Final = 8
PREFIX_TOKENS: Final = 256
NUM_GENERATED: Final = 24
NUM_LOG_PROBS: Final = 20
ALL_SECONDS: Final = 240.0
# 12 requests of three to six blocks each want some 50 of the 23 blocks.
SETTINGS: Final = replace(LLAMA.settings, max_num_seqs=12, num_blocks=24)
ROOMY: Final = replace(SETTINGS, num_blocks=512)


def make_prompts() -> list[list[int]]:
    """Prompts of 300 to 730 tokens; some end right below a block's end, so that generation needs one block more."""
    prompts = []
    for prefix in range(NUM_PREFIXES):
        shared = prompt_of(PREFIX_TOKENS, seed=prefix)
        for number in range(NUM_PER_PREFIX):
            num_tokens = 44 + 61 * number if number % 2 else 128 * (1 + number // 2) - 8
            prompts.append(shared + prompt_of(num_tokens, seed=100 + NUM_PER_PREFIX * prefix + number))
    return prompts


PROMPTS: Final = make_prompts()


def serve_all(engine: EngineProcess) -> list[Generation]:
    """Serve all prompts at once, with nothing but the pool to remember them."""
    engine.reset_prefix_cache()
    engine.begin_generate(PROMPTS, NUM_GENERATED, num_log_probs=NUM_LOG_PROBS)
    return engine.end_generate(ALL_SECONDS)


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[dict[str, EngineProcess]]:
    """One with room for all and no connector; and with little room one with each connector."""
    kinds = {
        PLAIN: ROOMY,
        REFERENCE: SETTINGS.with_vllm_connector(),
        OURS: SETTINGS.with_our_connector(load_failure_policy="recompute"),
    }
    with ExitStack() as stack:
        started = {}
        for kind, settings in kinds.items():
            started[kind] = fleet.start(LLAMA, f"{kind}-load", settings)
            stack.callback(started[kind].close)
            stack.callback(started[kind].end)
        yield started


@pytest.fixture(scope="module")
def plain(engines: dict[str, EngineProcess]) -> list[Generation]:
    """The answers of an engine without a connector, none of whose requests is preempted."""
    engines[PLAIN].wait_until_ready()
    answers = serve_all(engines[PLAIN])
    assert engines[PLAIN].state().counters["vllm:num_preemptions"] == 0
    return answers


@pytest.mark.parametrize("kind", [REFERENCE, OURS])
def test_more_prompts_than_the_cache_holds(
    fleet: Fleet, engines: dict[str, EngineProcess], plain: list[Generation], kind: str
) -> None:
    """Twice: into an empty pool, and with a pool that holds all of them."""
    assert len(PROMPTS) == NUM_PREFIXES * NUM_PER_PREFIX == 64
    engine = engines[kind]
    engine.wait_until_ready()
    fleet.pool.clear()
    cold = serve_all(engine)
    assert engine.state().counters["vllm:num_preemptions"] > 0
    warm = serve_all(engine)
    for answers in (cold, warm):
        for answer, expected in zip(answers, plain, strict=True):
            assert answer.finish_reason == "length"
            assert_close_answer(answer, expected)
    # All whole blocks are in the pool, but for the last token's.
    assert [answer.num_cached_tokens for answer in warm] == [(len(prompt) - 1) // 128 * 128 for prompt in PROMPTS]
    assert_idle(engine.state())
