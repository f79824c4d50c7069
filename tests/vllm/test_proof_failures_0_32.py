"""Proof 4: whatever the pool does, answers stay those of an engine without a connector, and the engine goes on.

The engines are held at a gate (`store_gate`) at the moment that counts, and let through when the harm is done. A
request that hangs is a failure: whoever waits for an engine has a deadline. Under ``kv_load_failure_policy``
``recompute`` a prefix that cannot be loaded after all is computed, so every answer is known.

A prefix that was loaded in part is computed in other pieces than a cold one, hence `assert_close_answer`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest

import store_gate
from engine_process import EngineProcess, Generation
from fleet import (
    MODELS,
    NUM_GENERATED,
    OURS,
    Fleet,
    Model,
    assert_close_answer,
    assert_idle,
    assert_same_answer,
    case_name,
)
from mooncake_pool import MooncakePool
from processes import wait_until

pytestmark = [pytest.mark.vllm_version("0.32.0"), pytest.mark.timeout(600)]

POOL_BYTES: Final = 32 << 20  # a full one is made within a second
DEAD_SECONDS: Final = 60.0  # calls to a dead master are given up after 4 s each
AGAIN_SECONDS: Final = 90.0


class Victim:
    """An engine of ours on a pool that is harmed, with its model and the model's answer."""

    def __init__(self, model: Model, engine: EngineProcess, pool: MooncakePool, plain: Generation) -> None:
        """Take them together."""
        self.model = model
        self.engine = engine
        self.pool = pool
        self.plain = plain

    def serve(self) -> Generation:
        """Serve the prompt with nothing but the pool to remember it."""
        self.engine.reset_prefix_cache()
        return self.engine.generate(self.model.prompt, NUM_GENERATED)

    def begin(self, point: str) -> None:
        """Serve it up to a point, where the engine is held."""
        self.engine.reset_prefix_cache()
        self.engine.arm(point)
        self.engine.begin_generate([self.model.prompt], NUM_GENERATED)
        self.engine.wait_at_gate()

    def end(self) -> Generation:
        """Let the engine go on; the answer."""
        self.engine.open_gate()
        (answer,) = self.engine.end_generate(DEAD_SECONDS)
        return answer

    def saved(self) -> set[str]:
        """Serve the prompt into an empty pool; all keys that then are there.

        More than once if need be: the test before may have restarted the master that the engine was connected to.
        """
        self.pool.clear()
        wait_until(self._saves_anything, "saving into an empty pool", AGAIN_SECONDS)
        keys = self.pool.keys()
        assert len(keys) >= self.model.num_hit_tokens // 128
        return keys

    def goes_on(self, keys: set[str]) -> None:
        """Assert that the engine saves again, within a bounded time, then serves from the pool, and holds nothing."""
        wait_until(lambda: self._saves_again(keys), "saving everything again", AGAIN_SECONDS)
        warm = self.serve()
        assert warm.num_cached_tokens == self.model.num_hit_tokens
        assert_close_answer(warm, self.plain)
        assert_idle(self.engine.state())

    def _saves_anything(self) -> bool:
        assert_same_answer(self.serve(), self.plain)
        return bool(self.pool.keys())

    def _saves_again(self, keys: set[str]) -> bool:
        assert_close_answer(self.serve(), self.plain)
        return self.pool.keys() >= keys


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    """A pool that no other test uses."""
    with MooncakePool(tmp_path_factory.mktemp("harmed"), memory_bytes=POOL_BYTES) as harmed:
        yield harmed


@pytest.fixture(scope="module")
def victims(fleet: Fleet, pool: MooncakePool) -> Iterator[dict[str, Victim]]:
    """One for each model, booted side by side."""
    with ExitStack() as stack:
        engines = []
        for model in MODELS:
            settings = model.settings.with_our_connector(load_failure_policy="recompute")
            engine = fleet.start(model, f"{OURS}-harmed", settings, pool)
            stack.callback(engine.close)
            stack.callback(engine.end)
            engines.append((model, engine))
        for _, engine in engines:
            engine.wait_until_ready()
        yield {model.name: Victim(model, engine, pool, fleet.plain_answer(model)) for model, engine in engines}


@pytest.fixture(params=MODELS, ids=case_name)
def victim(victims: dict[str, Victim], request: pytest.FixtureRequest) -> Victim:
    """One of them."""
    return victims[request.param.name]


def chosen(keys: set[str], which: str) -> list[str]:
    """Some of the keys: all, or those of one group, or one in the middle; the order of hashes is as good as any."""
    if which == "all":
        return sorted(keys)
    last_group = max(key.partition("@group:")[2].partition("@")[0] for key in keys)
    group = sorted(key for key in keys if f"@group:{last_group}@" in key)
    return group if which == "a group" else group[len(group) // 2 :][:1]


@pytest.mark.parametrize("which", ["all", "a group", "one"])
def test_keys_are_removed_between_lookup_and_load(victim: Victim, which: str) -> None:
    keys = victim.saved()
    victim.begin(store_gate.ALLOCATED)
    victim.pool.remove(chosen(keys, which))
    answer = victim.end()
    assert answer.finish_reason == "length"
    assert_close_answer(answer, victim.plain)
    victim.goes_on(keys)


def test_the_master_dies_during_a_load_and_comes_back(victim: Victim) -> None:
    keys = victim.saved()
    victim.begin(store_gate.GET)
    victim.pool.kill_master()
    try:
        answer = victim.end()
        assert answer.finish_reason == "length"
        assert_close_answer(answer, victim.plain)
        # Without a master: nothing is found, and nobody waits for it.
        without = victim.serve()
        assert without.num_cached_tokens == 0
        assert_same_answer(without, victim.plain)
    finally:
        victim.pool.restart_master()
    victim.goes_on(keys)


def test_the_master_dies_during_a_save_and_comes_back(victim: Victim) -> None:
    keys = victim.saved()
    victim.pool.clear()
    victim.begin(store_gate.PUT)
    victim.pool.kill_master()
    try:
        assert_same_answer(victim.end(), victim.plain)
    finally:
        victim.pool.restart_master()
    assert victim.pool.keys() == set()
    victim.goes_on(keys)


def test_a_full_pool_takes_nothing_and_harms_nothing(victim: Victim) -> None:
    keys = victim.saved()
    victim.pool.clear()
    victim.pool.fill()
    for _ in range(2):
        answer = victim.serve()
        assert answer.num_cached_tokens == 0
        assert_same_answer(answer, victim.plain)
    assert victim.pool.keys() & keys == set()
    victim.pool.clear()
    victim.goes_on(keys)
