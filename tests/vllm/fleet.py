"""The engines of the proofs with vLLM 0.32.0: booted when first asked for, side by side, and kept for the whole run.

Of each model there are three kinds. ``plain`` has no connector: what the model answers when nothing but its own
arithmetic is involved. ``reference`` has vLLM's own connector, ``ours`` has this package's. The two share one pool.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from checkpoint import write_checkpoint
from engine_process import EngineProcess, Generation, State
from engine_settings import EngineSettings
from gemma_checkpoint import write_gemma_checkpoint
from mooncake_pool import MooncakePool

NUM_GENERATED: Final = 8
BLOCK_SIZE: Final = 128  # vLLM's default on CPU
TOLERANCE: Final = 1e-3
"""Of log-probabilities whose sums were made in another order. A single wrong object moves one by 100 times as much."""
PLAIN: Final = "plain"
REFERENCE: Final = "reference"
OURS: Final = "ours"


@dataclass(frozen=True)
class Model:
    """A checkpoint, the engine that fits it, and a prompt whose hit is known."""

    name: str
    write: Callable[[Path], Path]
    settings: EngineSettings
    num_prompt_tokens: int
    num_hit_tokens: int
    """What vLLM's own connector reports as cached when the prompt comes again."""
    num_groups: int

    @property
    def prompt(self) -> list[int]:
        """The prompt."""
        return prompt_of(self.num_prompt_tokens)


LLAMA: Final = Model("tiny-llama", write_checkpoint, EngineSettings(), 700, 640, num_groups=1)
GEMMA: Final = Model(
    "tiny-gemma",
    write_gemma_checkpoint,
    EngineSettings(num_blocks=64, max_model_len=1280, max_step_tokens=1024, is_hybrid=True),
    1100,
    1024,
    num_groups=3,
)
MODELS: Final = (LLAMA, GEMMA)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Return token ids whose order has no short period, so that no two blocks hold the same tokens."""
    return [(index * index + (7 + seed) * index) % 509 + 3 for index in range(num_tokens)]


def case_name(value: object) -> str:
    """Name a parameter in a test's id."""
    if isinstance(value, tuple):
        return "-".join(map(case_name, value))
    return value.name if isinstance(value, Model) else str(value)


def settings_of(model: Model, kind: str) -> EngineSettings:
    """Return the model's settings with the connector of a kind."""
    if kind == PLAIN:
        return model.settings
    return model.settings.with_vllm_connector() if kind == REFERENCE else model.settings.with_our_connector()


def assert_same_answer(answer: Generation, expected: Generation) -> None:
    """Fail unless tokens and log-probabilities are the same, to the last bit."""
    assert answer.token_ids == expected.token_ids
    assert answer.log_probs == expected.log_probs


def assert_close_answer(answer: Generation, expected: Generation) -> None:
    """Fail unless the tokens are the same and the log-probabilities agree up to the order of summation.

    For prompts that are computed in other pieces, or beside others: the shapes of the matrices differ then, and with
    them the last bits of the floats. Of the likeliest tokens the log-probabilities are compared by rank.
    """
    assert answer.token_ids == expected.token_ids
    assert distance(answer, expected) < TOLERANCE


def assert_idle(state: State) -> None:
    """Fail unless an engine that has nothing to do holds nothing: no request, no reference on a block, no job."""
    assert (state.num_requests, state.num_references, state.has_jobs) == (0, 0, False)
    assert state.num_free_blocks == state.num_blocks - 1  # but for the null block
    assert state.leftovers == dict.fromkeys(state.leftovers, 0)


def distance(answer: Generation, expected: Generation) -> float:
    """Return by how much a log-probability differs at most, in the first token's distribution and the others'."""
    return max(
        abs(one - other)
        for step, expected_step in zip(answer.log_probs, expected.log_probs, strict=True)
        for one, other in zip(sorted(step), sorted(expected_step), strict=True)
    )


class Fleet:
    """One pool and the engines on it, all gone after the ``with`` block."""

    def __init__(self, directory: Path) -> None:
        """Start the pool; no engine yet.

        Args:
            directory: Takes checkpoints, logs and the pool's configuration.
        """
        self._directory = directory
        self._stack = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._answers: dict[str, Generation] = {}
        self.pool = self._stack.enter_context(MooncakePool(directory))

    def __enter__(self) -> Self:
        """Return the fleet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End everything, the engines side by side."""
        for engine in self._engines.values():
            engine.end()
        self._stack.close()

    def checkpoint(self, model: Model) -> Path:
        """Return the model's directory; its last component is part of every key."""
        directory = self._directory / model.name
        return directory if directory.exists() else model.write(directory)

    def start(
        self, model: Model, name: str, settings: EngineSettings, pool: MooncakePool | None = None
    ) -> EngineProcess:
        """Start an engine beside those of the three kinds, without waiting for it; whoever asked ends it."""
        config_path = (pool or self.pool).config_path
        return EngineProcess(
            f"{model.name}-{name}", self.checkpoint(model), self._directory, settings, config_path=config_path
        )

    def engines(self, model: Model, *kinds: str) -> list[EngineProcess]:
        """Return engines of some kinds, ready. All kinds boot side by side, as sooner or later all are asked for."""
        for kind in (PLAIN, REFERENCE, OURS):
            name = f"{model.name}-{kind}"
            if name not in self._engines:
                engine = self.start(model, kind, settings_of(model, kind))
                self._stack.callback(engine.close)
                self._engines[name] = engine
        engines = [self._engines[f"{model.name}-{kind}"] for kind in kinds]
        for engine in engines:
            engine.wait_until_ready()
        return engines

    def plain_answer(self, model: Model, prompt: list[int] | None = None) -> Generation:
        """Return what the model answers to a prompt, its own if none is given, where there is no connector."""
        prompt = model.prompt if prompt is None else prompt
        name = f"{model.name} {prompt}"
        if name not in self._answers:
            (engine,) = self.engines(model, PLAIN)
            engine.reset_prefix_cache()
            self._answers[name] = engine.generate(prompt, NUM_GENERATED, score_prompt=True)
        return self._answers[name]
