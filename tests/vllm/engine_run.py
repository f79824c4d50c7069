"""One vLLM engine in a process of its own, told what to do by one JSON object per line on its standard input.

The engine's core, scheduler and worker live in this process (the parent sets ``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so
that what they hold can be looked at. Each command is answered by one JSON line on a pipe of its own, because vLLM logs
to both standard streams. Floats are written in the shortest form that reads back as the same float.

Commands::

    {"op": "generate", "prompts": [[1, 2]], "num_tokens": 8, "num_log_probs": -1, "score_prompt": false}
    {"op": "reset_prefix_cache"}
    {"op": "arm", "point": "put"}
    {"op": "state"}
    {"op": "evidence"}

The process ends at the end of its input.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

import data_swap
from call_counter import CallCounter
from connector_probe import ConnectorProbe
from engine_settings import EngineSettings
from store_gate import StoreGate

# A step of an idle engine takes milliseconds. A request or a job that is still there after so long is stuck: even a put
# to a dead master is given up within seconds.
SETTLE_SECONDS = 60.0


class Engine:
    """An ``LLM``, with a connector to a Mooncake pool or without one."""

    def __init__(self, model: Path, settings: EngineSettings, gate: StoreGate) -> None:
        """Boot the engine; a connector uses the pool that ``MOONCAKE_CONFIG_PATH`` describes."""
        self._gate = gate
        self._calls: CallCounter | None = None
        if settings.connector is not None:
            gate.watch_store()
        if settings.has_evidence:
            self._originals = data_swap.originals()
            if settings.data_module is not None:
                data_swap.replace(settings.data_module)
            self._calls = CallCounter(data_swap.DATA_MODULE, "mooncrate")
            self._calls.threads()
        vllm = import_module("vllm")
        self._sampling_params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=True,
            dtype="float32",
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_step_tokens,
            max_num_seqs=settings.max_num_seqs,
            num_gpu_blocks_override=settings.num_blocks,
            max_logprobs=-1,
            seed=0,
            disable_log_stats=False,  # else preemptions are not counted
            kv_transfer_config=_transfer_config(settings),
            **({"disable_hybrid_kv_cache_manager": False} if settings.is_hybrid else {}),
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        if settings.connector is not None:
            gate.watch_connector(self._scheduler.connector)
        has_probe = settings.has_evidence and settings.connector is not None
        self._probe = ConnectorProbe(self._llm) if has_probe else None

    def generate(
        self, prompts: list[list[int]], num_tokens: int, *, num_log_probs: int, score_prompt: bool
    ) -> dict[str, Any]:
        """Generate greedily, and wait until what the requests left to save is in the pool.

        Args:
            prompts: Token ids.
            num_tokens: How many tokens to generate for each.
            num_log_probs: Log-probabilities of so many likely tokens besides the chosen one; -1 for all.
            score_prompt: Also return the log-probability of each prompt token but the first. Use it only where
                nothing of the prompt is cached: cached tokens are not computed, and so have none.

        Returns:
            For each prompt the number of cached tokens, the generated tokens, and for each of these the
            log-probabilities by token id, in the order of the ids.
        """
        params = self._sampling_params(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=num_log_probs,
            prompt_logprobs=0 if score_prompt else None,
            detokenize=False,
        )
        with self._calls.this_thread() if self._calls else nullcontext():
            outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            self._settle()
        return {"answers": [_answer(output, prompt) for output, prompt in zip(outputs, prompts, strict=True)]}

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget every block of the engine's own prefix cache, and leave the pool alone."""
        return {"ok": self._llm.reset_prefix_cache()}

    def arm(self, point: str) -> dict[str, Any]:
        """Hold the engine at a point, once; see `store_gate`."""
        self._gate.arm(point)
        return {"ok": True}

    def state(self) -> dict[str, Any]:
        """Return what the scheduler holds: requests, references on blocks, jobs of the connector; and its counters."""
        block_pool = self._scheduler.kv_cache_manager.block_pool
        connector = self._scheduler.connector
        counters = {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}
        return {
            "num_requests": len(self._scheduler.requests),
            "num_blocks": len(block_pool.blocks),
            "num_free_blocks": block_pool.get_num_free_blocks(),
            "num_references": sum(block.ref_cnt for block in block_pool.blocks if not block.is_null),
            "has_jobs": connector is not None and connector.has_pending_push_work(),
            "leftovers": _leftovers(connector),
            "counters": counters,
        }

    def evidence(self) -> dict[str, Any]:
        """Return whose classes the connector's modules and live objects use, and which functions were called."""
        return {
            "vllm_version": import_module("vllm").__version__,
            "defining_modules": data_swap.defining_modules(),
            "holders_of_originals": data_swap.holders(self._originals),
            "live_objects": self._probe.live_objects() if self._probe else {},
            "calls": dict(self._calls.counts) if self._calls else {},
        }

    def _settle(self) -> None:
        """Wait for the queued saves: step the engine until it has let go of the blocks they read.

        Blocks that are still being saved stay in use until a later step of the scheduler hears that the save is done;
        the prefix cache cannot be reset before.
        """
        if self._scheduler.connector is None:
            return
        if self._probe is not None:
            self._probe.wait_for_saves()
        deadline = time.monotonic() + SETTLE_SECONDS
        # What an engine that serves asks before it goes to sleep: requests, and jobs of the connector.
        while self._scheduler.requests or self._scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine still holds a request or a job after {SETTLE_SECONDS:g} s")
            self._llm.llm_engine.step()


def _leftovers(connector: Any) -> dict[str, int]:  # noqa: ANN401 - any connector of vLLM
    """What our connector itself says that it holds, on both sides."""
    if not hasattr(connector, "num_referenced_blocks"):
        return {}
    worker: Any = get_kv_transfer_group()
    return {
        "jobs of the scheduler": connector.num_jobs,
        "referenced blocks": connector.num_referenced_blocks,
        "jobs of the worker": worker.num_jobs,
    }


def _answer(output: Any, prompt: list[int]) -> dict[str, Any]:  # noqa: ANN401 - vLLM's request output
    (completion,) = output.outputs
    return {
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": completion.finish_reason,
        "token_ids": list(completion.token_ids),
        "log_probs": [[step[token].logprob for token in sorted(step)] for step in completion.logprobs],
        "prompt_log_probs": [
            scores[token].logprob for scores, token in zip(output.prompt_logprobs or [], prompt, strict=False) if scores
        ],
    }


def _transfer_config(settings: EngineSettings) -> object:
    if settings.connector is None:
        return None
    options: dict[str, Any] = {}
    if settings.connector_module is not None:
        options["kv_connector_module_path"] = settings.connector_module
    return import_module("vllm.config").KVTransferConfig(
        kv_connector=settings.connector,
        kv_role=settings.kv_role,
        kv_load_failure_policy=settings.load_failure_policy,
        kv_connector_extra_config=settings.extra_config,
        **options,
    )


def main() -> None:
    """Serve commands until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", type=EngineSettings.from_json, required=True, help="EngineSettings as JSON")
    parser.add_argument("--answers-fd", type=int, required=True, help="inherited pipe that takes the answers")
    parser.add_argument("--reached-fd", type=int, required=True, help="inherited pipe that takes a byte at the gate")
    parser.add_argument("--opened-fd", type=int, required=True, help="inherited pipe whose bytes open the gate")
    options = parser.parse_args()
    with os.fdopen(options.answers_fd, "w", buffering=1) as answers:
        engine = Engine(options.model, options.settings, StoreGate(options.reached_fd, options.opened_fd))
        answers.write('{"ready": true}\n')
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "generate": engine.generate,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "arm": engine.arm,
            "state": engine.state,
            "evidence": engine.evidence,
        }
        for line in sys.stdin:
            command = json.loads(line)
            answer = commands[command.pop("op")](**command)
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
