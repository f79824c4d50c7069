"""One vLLM engine in a process of its own, told what to do by one JSON object per line on its standard input.

The engine's core, scheduler and worker live in this process (the parent sets ``VLLM_ENABLE_V1_MULTIPROCESSING=0``), so
that what they hold can be looked at. Each command is answered by one JSON line on a pipe of its own, because vLLM logs
to both standard streams. Floats are written in the shortest form that reads back as the same float.

Commands::

    {"op": "generate", "prompt": [1, 2], "num_tokens": 8, "score_prompt": false}
    {"op": "reset_prefix_cache"}
    {"op": "evidence"}

The process ends at the end of its input.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import data_swap
from call_counter import CallCounter
from connector_probe import ConnectorProbe

# A step of an idle engine takes milliseconds; a request whose blocks are still held after so many of them is stuck.
MAX_IDLE_STEPS = 100

# A cold prefill of 641 to 767 tokens is computed as 640 and the rest, just as a warm one computes the rest on 640 from
# the pool: the same shapes, so the same floats to the last bit.
MAX_STEP_TOKENS = 640


class Engine:
    """An ``LLM``, with vLLM's Mooncake store connector or without one."""

    def __init__(self, model: Path, *, num_blocks: int, with_connector: bool, data_module: str | None) -> None:
        """Boot the engine.

        Args:
            model: Directory of the checkpoint.
            num_blocks: Blocks of KV cache to allocate, the null block included.
            with_connector: Use the connector, with the pool that ``MOONCAKE_CONFIG_PATH`` describes.
            data_module: Module whose classes replace those of the connector's data module; ``None`` leaves vLLM as is.
        """
        self._originals = data_swap.originals()
        if data_module is not None:
            data_swap.replace(data_module)
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
            max_model_len=1024,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_num_seqs=4,
            num_gpu_blocks_override=num_blocks,
            max_logprobs=-1,
            seed=0,
            kv_transfer_config=_transfer_config() if with_connector else None,
        )
        self._probe = ConnectorProbe(self._llm) if with_connector else None

    def generate(self, prompt: list[int], num_tokens: int, *, score_prompt: bool) -> dict[str, Any]:
        """Generate greedily, and wait until what the request left to save is in the pool.

        Args:
            prompt: Token ids.
            num_tokens: How many tokens to generate.
            score_prompt: Also return the log-probability of each prompt token but the first. Use it only where
                nothing of the prompt is cached: cached tokens are not computed, and so have none.

        Returns:
            The number of cached tokens, the generated tokens, and for each the log-probabilities of the whole
            vocabulary in the order of the token ids.
        """
        params = self._sampling_params(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=-1,
            prompt_logprobs=0 if score_prompt else None,
            detokenize=False,
        )
        with self._calls.this_thread():
            (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            self._settle()
        (completion,) = output.outputs
        return {
            "num_cached_tokens": output.num_cached_tokens,
            "token_ids": list(completion.token_ids),
            "log_probs": [[step[token].logprob for token in sorted(step)] for step in completion.logprobs],
            "prompt_log_probs": [
                scores[token].logprob
                for scores, token in zip(output.prompt_logprobs or [], prompt, strict=False)
                if scores
            ],
        }

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget every block of the engine's own prefix cache, and leave the pool alone."""
        return {"ok": self._llm.reset_prefix_cache()}

    def evidence(self) -> dict[str, Any]:
        """Return whose classes the connector's modules and live objects use, and which functions were called."""
        return {
            "vllm_version": import_module("vllm").__version__,
            "defining_modules": data_swap.defining_modules(),
            "holders_of_originals": data_swap.holders(self._originals),
            "live_objects": self._probe.live_objects() if self._probe else {},
            "calls": dict(self._calls.counts),
        }

    def _settle(self) -> None:
        """Wait for the queued saves, then step the engine until it lets go of the blocks they read.

        Blocks of a finished request that are still being saved stay in use until a later step of the scheduler hears
        that the save is done; the prefix cache cannot be reset before.
        """
        if self._probe is None:
            return
        self._probe.wait_for_saves()
        for _ in range(MAX_IDLE_STEPS):
            if not self._probe.holds_requests():
                return
            self._llm.llm_engine.step()
        raise RuntimeError(f"the engine still holds a request after {MAX_IDLE_STEPS} idle steps")


def _transfer_config() -> object:
    config = import_module("vllm.config").KVTransferConfig
    return config(kv_connector="MooncakeStoreConnector", kv_role="kv_both")


def main() -> None:
    """Serve commands until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num-blocks", type=int, default=32)
    parser.add_argument("--connector", action="store_true", help="use vLLM's MooncakeStoreConnector")
    parser.add_argument("--data-module", help="put the classes of this module in place of the connector's own")
    parser.add_argument("--answers-fd", type=int, required=True, help="inherited pipe that takes the answers")
    options = parser.parse_args()
    with os.fdopen(options.answers_fd, "w", buffering=1) as answers:
        engine = Engine(
            options.model,
            num_blocks=options.num_blocks,
            with_connector=options.connector,
            data_module=options.data_module,
        )
        answers.write('{"ready": true}\n')
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "generate": engine.generate,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "evidence": engine.evidence,
        }
        for line in sys.stdin:
            command = json.loads(line)
            answer = commands[command.pop("op")](**command)
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
