"""vLLM 0.27.1, its own Mooncake store connector and a real pool, with and without our classes in place of vLLM's.

Three engines serve the same prompts:

- ``plain`` has no connector: what the model answers when nothing but its own arithmetic is involved;
- ``reference`` has the connector as vLLM ships it: what belongs in the pool;
- ``ours`` has the connector with the classes of ``mooncrate.data``.

Log-probabilities are compared with ``==``. That holds because every engine computes in the same pieces: the step limit
of 640 tokens makes a cold prefill of 700 tokens stop where a warm one starts. Without that the pieces differ in shape,
and the last bits of the floats with them, connector or not.

These tests run under vLLM 0.27.1 only, the version whose data module is the reference; ``conftest.py`` says how.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pytest

from checkpoint import NUM_LAYERS, VOCAB_SIZE, block_bytes, write_checkpoint
from engine_process import EngineProcess, Generation
from engine_settings import EngineSettings
from mooncake_pool import MooncakePool

# The first test boots the engines, which takes a minute on two idle cores and several on busy ones.
pytestmark = [pytest.mark.vllm_version("0.27.1"), pytest.mark.timeout(600)]

BLOCK_SIZE: Final = 128  # vLLM's default on CPU
MODEL_NAME: Final = "tiny-llama"
NUM_GENERATED: Final = 8
NUM_PROMPT_TOKENS: Final = 700
NUM_HIT_TOKENS: Final = 640
NUM_CHUNKS: Final = NUM_HIT_TOKENS // BLOCK_SIZE
REFERENCE_MODULE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data"


def prompt_of(num_tokens: int) -> list[int]:
    """Return token ids whose order has no short period, so that no two blocks hold the same tokens."""
    return [(index * index + 7 * index) % 509 + 3 for index in range(num_tokens)]


PROMPT: Final = prompt_of(NUM_PROMPT_TOKENS)


@dataclass(frozen=True)
class Engines:
    """The three engines, ready, and the pool that two of them share."""

    pool: MooncakePool
    plain: EngineProcess
    reference: EngineProcess
    ours: EngineProcess


@dataclass(frozen=True)
class Run:
    """One prompt through one engine twice: into an empty pool, then out of it."""

    cold: Generation
    warm: Generation
    objects: dict[str, bytes]
    objects_after_warm: dict[str, bytes]
    evidence: dict[str, Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Boot everything once for this file, the engines side by side, and end it all whatever happens."""
    directory = tmp_path_factory.mktemp("engines")
    model = write_checkpoint(directory / MODEL_NAME)
    plain = EngineSettings(has_evidence=True)
    with ExitStack() as stack:
        pool = stack.enter_context(MooncakePool(directory))

        def start(name: str, settings: EngineSettings) -> EngineProcess:
            engine = EngineProcess(name, model, directory, settings, config_path=pool.config_path)
            stack.callback(engine.close)
            return engine

        engines = Engines(
            pool,
            plain=start("plain", plain),
            reference=start("reference", plain.with_vllm_connector()),
            ours=start("ours", plain.with_vllm_connector(data_module="mooncrate.data")),
        )
        for engine in (engines.plain, engines.reference, engines.ours):
            engine.wait_until_ready()
        yield engines


def run_twice(engine: EngineProcess, pool: MooncakePool, prompt: list[int]) -> Run:
    """Serve a prompt from nothing, then once more with only the pool to remember it."""
    pool.clear()
    engine.reset_prefix_cache()
    cold = engine.generate(prompt, NUM_GENERATED, score_prompt=True)
    objects = pool.objects()
    engine.reset_prefix_cache()
    warm = engine.generate(prompt, NUM_GENERATED)
    return Run(cold, warm, objects, pool.objects(), engine.evidence())


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Generation:
    """The answer without a connector."""
    engines.plain.reset_prefix_cache()
    return engines.plain.generate(PROMPT, NUM_GENERATED, score_prompt=True)


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Run:
    """The prompt through the engine with vLLM's classes."""
    return run_twice(engines.reference, engines.pool, PROMPT)


@pytest.fixture(scope="module")
def ours(engines: Engines) -> Run:
    """The prompt through the engine with our classes."""
    return run_twice(engines.ours, engines.pool, PROMPT)


def restore(pool: MooncakePool, objects: dict[str, bytes]) -> None:
    """Make the pool hold these objects and no others."""
    pool.clear()
    for key, value in objects.items():
        pool.put(key, value)
    assert pool.keys() == set(objects)


def digests(objects: dict[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each object: as good to compare, and a difference that can be read."""
    return {key: hashlib.sha256(value).hexdigest() for key, value in objects.items()}


def assert_same_answer(answer: Generation, expected: Generation) -> None:
    """Fail unless tokens and log-probabilities are the same, to the last bit."""
    assert answer.token_ids == expected.token_ids
    assert answer.log_probs == expected.log_probs


def test_the_second_request_is_served_from_the_pool(ours: Run, reference: Run) -> None:
    """700 tokens hold five whole blocks of 128."""
    assert (ours.cold.num_cached_tokens, ours.warm.num_cached_tokens) == (0, NUM_HIT_TOKENS)
    assert (reference.cold.num_cached_tokens, reference.warm.num_cached_tokens) == (0, NUM_HIT_TOKENS)


def test_the_answer_is_that_of_an_engine_without_a_connector(ours: Run, reference: Run, plain: Generation) -> None:
    """Of the whole vocabulary, for every generated token, and of the prompt."""
    assert [len(step) for step in plain.log_probs] == [VOCAB_SIZE] * NUM_GENERATED
    assert len(plain.prompt_log_probs) == NUM_PROMPT_TOKENS - 1
    assert all(math.isfinite(value) for step in plain.log_probs for value in step)
    for run in (ours, reference):
        assert_same_answer(run.cold, plain)
        assert_same_answer(run.warm, plain)
        assert run.cold.prompt_log_probs == plain.prompt_log_probs


def test_the_pool_holds_what_the_reference_engine_writes(ours: Run, reference: Run) -> None:
    """The same keys, and the same bytes under each; a hit writes nothing."""
    assert set(ours.objects) == set(reference.objects)
    assert digests(ours.objects) == digests(reference.objects)
    assert digests(ours.objects_after_warm) == digests(ours.objects)


def test_the_objects_are_whole_blocks_under_the_documented_keys(ours: Run) -> None:
    """One object per full block, in the frozen format of the keys."""
    assert len(ours.objects) == NUM_CHUNKS
    assert {len(value) for value in ours.objects.values()} == {block_bytes(BLOCK_SIZE)}
    key = re.compile(rf"{MODEL_NAME}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@[0-9a-f]{{64}}")
    assert [name for name in ours.objects if not key.fullmatch(name)] == []


def test_the_connector_really_runs_on_our_classes(ours: Run) -> None:
    """Modules, live objects and calls name mooncrate, and nothing of vLLM's data module is left in use."""
    evidence = ours.evidence
    assert evidence["vllm_version"] == "0.27.1"
    assert evidence["holders_of_originals"] == []
    for where, module in evidence["defining_modules"].items():
        assert module.startswith("mooncrate."), where
    places = set()
    for seen, count in evidence["live_objects"].items():
        place, _, class_name = seen.partition(": ")
        assert class_name.startswith("mooncrate."), seen
        assert count > 0
        places.add(place)
    assert places >= {
        "lookup.block_hashes",
        "metadata",
        "metadata.requests",
        "load_spec",
        "tracker",
        "worker.token_dbs",
        "send_thread.token_databases",
        "recv_thread.token_databases",
    }
    assert {call.rpartition(".")[2] for call in evidence["calls"]} >= {
        "build_key_string",
        "chunk_hashes_for_block_size",
        "from_request_tracker",
        "key_for",
        "prepare_values",
        "process_tokens",
    }
    assert [call for call in evidence["calls"] if not call.startswith("mooncrate.")] == []


def test_the_evidence_tells_the_reference_engine_apart(reference: Run) -> None:
    """The same report of the untouched engine names vLLM's module everywhere."""
    evidence = reference.evidence
    assert set(evidence["defining_modules"].values()) == {REFERENCE_MODULE}
    assert evidence["holders_of_originals"]
    assert [seen for seen in evidence["live_objects"] if f": {REFERENCE_MODULE}." not in seen] == []
    assert evidence["calls"]
    assert [call for call in evidence["calls"] if not call.startswith(REFERENCE_MODULE)] == []


@pytest.mark.parametrize(("writer", "reader"), [("reference", "ours"), ("ours", "reference")])
def test_either_engine_loads_what_the_other_saved(
    engines: Engines, plain: Generation, writer: str, reader: str
) -> None:
    """A fleet can be moved over engine by engine, and back."""
    engines.pool.clear()
    for name in (writer, reader):
        getattr(engines, name).reset_prefix_cache()
    getattr(engines, writer).generate(PROMPT, NUM_GENERATED)
    answer = getattr(engines, reader).generate(PROMPT, NUM_GENERATED)
    assert answer.num_cached_tokens == NUM_HIT_TOKENS
    assert_same_answer(answer, plain)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 255, 256, 257, 640, 641, 1000])
def test_lengths_around_the_block_size_agree_with_the_reference(engines: Engines, num_tokens: int) -> None:
    """Hits, keys, bytes and answers; a prompt of exactly n blocks hits n - 1, so that a token is left to compute."""
    prompt = prompt_of(num_tokens)
    reference = run_twice(engines.reference, engines.pool, prompt)
    ours = run_twice(engines.ours, engines.pool, prompt)
    assert ours.warm.num_cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert digests(ours.objects) == digests(reference.objects)
    assert (ours.cold, ours.warm) == (reference.cold, reference.warm)


@pytest.mark.parametrize("region", range(NUM_LAYERS))
@pytest.mark.parametrize("index", range(NUM_CHUNKS))
def test_one_wrong_region_of_one_object_changes_the_answer(
    engines: Engines, ours: Run, plain: Generation, index: int, region: int
) -> None:
    """The comparisons above would see it: another chunk's bytes in one layer of one object, then the right ones again.

    The bytes are a real layer of a real chunk, so the answer stays finite and only their place is wrong.
    """
    keys = sorted(ours.objects)
    key, other = keys[index], keys[(index + 1) % NUM_CHUNKS]
    size = block_bytes(BLOCK_SIZE) // NUM_LAYERS
    start, end = region * size, (region + 1) * size
    right = ours.objects[key]
    wrong = right[:start] + ours.objects[other][start:end] + right[end:]
    restore(engines.pool, ours.objects)

    engines.pool.replace(key, wrong)
    engines.ours.reset_prefix_cache()
    answer = engines.ours.generate(PROMPT, NUM_GENERATED)
    assert answer.num_cached_tokens == NUM_HIT_TOKENS
    assert all(math.isfinite(value) for step in answer.log_probs for value in step)
    assert answer.log_probs[0] != plain.log_probs[0]

    engines.pool.replace(key, right)
    engines.ours.reset_prefix_cache()
    assert_same_answer(engines.ours.generate(PROMPT, NUM_GENERATED), plain)
