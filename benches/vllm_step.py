"""What an engine's own thread spends in the connector: ours beside vLLM's Mooncake connector, in one process, in turns.

Both connectors are made by vLLM's factory, for both roles, and are called as the scheduler and the worker of an engine
call them; only the store is one that answers after a set time. Two cases:

- *waiting*: 64 requests of 32,768 tokens wait, none is in the pool, and each call of the store takes 20 ms. Counted is
  the time that the scheduler's calls of the connector take in the first step, and until every request has its answer.
- *save*: one request of 131,072 tokens, block 16, 64 layers (8,192 chunks of 64 regions) is saved to a store that does
  nothing. Counted is the time of the worker's call that hands the job over, and until the job is reported as done.

Run it with ``make bench``, or with vLLM 0.32.0 on ``PYTHONPATH``:

    python benches/vllm_step.py [--rounds N] [--json FILE]

It exits 1 when our step takes longer than the one wait that the connector may make, or a save longer than vLLM's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_SIZE = 16
NUM_LAYERS = 64
NUM_WAITING = 64
WAITING_TOKENS = 32_768
SAVED_TOKENS = 131_072
NUM_BLOCKS = 100 + SAVED_TOKENS // BLOCK_SIZE
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(NUM_LAYERS)]
STORE_SECONDS = 0.020
STEP_BAR_MS = 200.0
POLL_SECONDS = 0.0005
NAMES: dict[str, dict[str, Any]] = {
    "reference": {"kv_connector": "MooncakeStoreConnector"},
    "reference, lookup_async": {
        "kv_connector": "MooncakeStoreConnector",
        "kv_connector_extra_config": {"lookup_async": True, "lookup_rpc_port": 1},
    },
    "ours": {"kv_connector": "MooncrateConnector", "kv_connector_module_path": "mooncrate.vllm"},
}


class TimedStore:
    """Takes the place of Mooncake's client: has nothing, takes everything, and answers after a set time."""

    seconds = 0.0
    num_put = 0

    def setup(self, *_args: object, **_options: object) -> int:
        """Success."""
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Nothing is there."""
        time.sleep(TimedStore.seconds)
        return [0] * len(keys)

    def batch_put_from_multi_buffers(self, keys: list[str], *_args: object) -> list[int]:
        """All of it went well."""
        TimedStore.num_put += len(keys)
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys: list[str], *_args: object) -> list[int]:
        """Nothing is there."""
        return [-704] * len(keys)

    def register_buffer(self, _address: int, _num_bytes: int) -> int:
        """Success."""
        return 0

    def unregister_buffer(self, _address: int) -> int:
        """Success."""
        return 0

    def remove_by_regex(self, _pattern: str, _force: bool) -> int:
        """Nothing went."""
        return 0

    def health_check(self) -> int:
        """Well."""
        return 0

    def close(self) -> int:
        """Success."""
        return 0


class NoDeviceEvent:
    """What vLLM's connector records on a device; here there is none, as in vLLM's own runner for the CPU."""

    def __init__(self, *_args: object, **_options: object) -> None:
        """Nothing."""

    def record(self, *_args: object) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@dataclass
class Times:
    """Milliseconds of one round."""

    step: float
    answered: float
    hand_over: float
    saved: float


class Connector:
    """Both roles of one connector, called as an engine calls them."""

    def __init__(self, options: dict[str, Any], directory: Path, cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        """Make both; the worker first, as vLLM's scheduler connects to a socket that its worker opens."""
        base = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        self._output = import_module("vllm.v1.core.sched.output")
        self._connector_output = import_module("vllm.v1.outputs").KVConnectorOutput
        self._blocks = import_module("vllm.v1.core.kv_cache_manager").KVCacheBlocks
        config = _vllm_config(options, directory)
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        self.worker = factory.create_connector(config, base.KVConnectorRole.WORKER, cache_config)
        # In the shape of vLLM's own: blocks, heads, tokens, keys and values.
        self._tensors = {name: torch.zeros(NUM_BLOCKS, 1, BLOCK_SIZE, 2, dtype=torch.bfloat16) for name in LAYERS}
        self.worker.register_kv_caches(self._tensors)
        self.scheduler = factory.create_connector(config, base.KVConnectorRole.SCHEDULER, cache_config)
        block_pool = import_module("vllm.v1.core.block_pool").BlockPool
        self._block_pool = block_pool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)
        self.scheduler.bind_gpu_block_pool(self._block_pool)

    def close(self) -> None:
        """End both."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    def wait_for_answers(self, requests: list[Any]) -> tuple[float, float]:
        """Milliseconds of the first step with these requests waiting, and until all have their answer."""
        start = time.perf_counter()
        waiting = self._ask(requests)
        self.scheduler.build_connector_meta(self._scheduled([], set()))
        first = time.perf_counter()
        while waiting:
            time.sleep(POLL_SECONDS)  # the rest of a step
            waiting = self._ask(waiting)
            self.scheduler.build_connector_meta(self._scheduled([], set()))
        answered = time.perf_counter()
        for request in requests:
            self.scheduler.request_finished_all_groups(request, ([],))
        self.scheduler.build_connector_meta(self._scheduled([], {request.request_id for request in requests}))
        return (first - start) * 1e3, (answered - start) * 1e3

    def save(self, request: Any) -> tuple[float, float]:  # noqa: ANN401 - vLLM's request
        """Milliseconds of the worker's calls for a whole request in one step, and until it is reported as saved."""
        while self._ask([request]):
            time.sleep(POLL_SECONDS)
        blocks = self._block_pool.get_new_blocks(request.num_tokens // BLOCK_SIZE)
        block_ids = [block.block_id for block in blocks]
        self.scheduler.update_state_after_alloc(request, self._blocks((blocks,)), 0)
        new = self._output.NewRequestData.from_request(request, (block_ids,))
        meta = self.scheduler.build_connector_meta(self._scheduled([new], set()))
        num_put = TimedStore.num_put
        start = time.perf_counter()
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        handed_over = time.perf_counter()
        while (done := self.worker.build_connector_worker_meta()) is None:
            time.sleep(POLL_SECONDS)
        saved = time.perf_counter()
        if TimedStore.num_put - num_put != request.num_tokens // BLOCK_SIZE:
            sys.exit(f"vllm_step: {TimedStore.num_put - num_put} chunks saved of {request.num_tokens // BLOCK_SIZE}")
        self.scheduler.update_connector_output(self._connector_output(kv_connector_worker_meta=done))
        self.scheduler.request_finished_all_groups(request, (block_ids,))
        self._block_pool.free_blocks(reversed(blocks))
        self._finish(request.request_id)
        if self.scheduler.has_pending_push_work():
            sys.exit("vllm_step: a job is left after the only one was reported")
        return (handed_over - start) * 1e3, (saved - start) * 1e3

    def _ask(self, requests: list[Any]) -> list[Any]:
        """Ask for each request; those without an answer yet."""
        answers = [(request, self.scheduler.get_num_new_matched_tokens(request, 0)[0]) for request in requests]
        if found := [num_tokens for _, num_tokens in answers if num_tokens]:
            sys.exit(f"vllm_step: {found} tokens found in a store that has nothing")
        return [request for request, num_tokens in answers if num_tokens is None]

    def _finish(self, request_id: str) -> None:
        meta = self.scheduler.build_connector_meta(self._scheduled([], {request_id}))
        self.worker.bind_connector_metadata(meta)
        self.worker.get_transfer_results({request_id})
        self.worker.clear_connector_metadata()

    def _scheduled(self, new: list[Any], finished: set[str]) -> Any:  # noqa: ANN401 - vLLM's
        output = self._output.SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        output.num_scheduled_tokens = {data.req_id: len(data.prompt_token_ids) for data in new}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.finished_req_ids = finished
        tables = {data.req_id: data.block_ids for data in new}
        output.kv_connector_block_state = self._output.KVConnectorBlockState(set(tables), tables.__getitem__, {})
        return output


def _vllm_config(options: dict[str, Any], directory: Path) -> Any:  # noqa: ANN401 - vLLM's
    transfer = import_module("vllm.config").KVTransferConfig(kv_role="kv_both", **options)
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=SAVED_TOKENS,
        max_num_batched_tokens=SAVED_TOKENS,
        kv_transfer_config=transfer,
    )
    return arguments.create_engine_config()


def _cache_config() -> Any:  # noqa: ANN401 - vLLM's
    interface = import_module("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    return interface.KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(LAYERS, spec)],
        hash_block_size=BLOCK_SIZE,
    )


def _requests(num_requests: int, num_tokens: int) -> list[Any]:
    """Requests of different tokens, with their hashes."""
    utils = import_module("vllm.v1.core.kv_cache_utils")
    sha256 = import_module("vllm.utils.hashing").sha256
    utils.init_none_hash(sha256)
    params = import_module("vllm").SamplingParams(max_tokens=1)
    hasher = utils.get_request_block_hasher(BLOCK_SIZE, sha256)
    request = import_module("vllm.v1.request").Request
    return [
        request(f"{number}", [(number + index) % 500 for index in range(num_tokens)], params, None, block_hasher=hasher)
        for number in range(num_requests)
    ]


def _write_model(directory: Path) -> None:
    """Only what the configuration is made from; no weights are read."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": SAVED_TOKENS,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


def _prepare(directory: Path) -> Callable[[], None]:
    """Environment, store and ranks of an engine; returns what undoes the latter."""
    listener = socket.create_server(("127.0.0.1", 0))  # a master's address that somebody listens at
    pool = {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{listener.getsockname()[1]}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
    }
    (directory / "mooncake.json").write_text(json.dumps(pool))
    os.environ |= {
        "MOONCAKE_CONFIG_PATH": str(directory / "mooncake.json"),
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_RPC_BASE_PATH": str(directory),
    }
    store_module: Any = import_module("mooncake.store")
    store_module.MooncakeDistributedStore = TimedStore
    cuda: Any = torch.cuda
    cuda.Event = NoDeviceEvent
    _write_model(directory)
    parallel = import_module("vllm.distributed.parallel_state")
    config = import_module("vllm.config")
    with config.set_current_vllm_config(_vllm_config(NAMES["reference"], directory)):
        parallel.init_distributed_environment(1, 0, f"file://{directory}/ranks", 0, "gloo")
        parallel.initialize_model_parallel()

    def undo() -> None:
        parallel.destroy_model_parallel()
        parallel.destroy_distributed_environment()
        listener.close()

    return undo


def _named(requests: list[Any], numbers: Iterator[int]) -> list[Any]:
    """The same requests as new ones, so that their hashes are made once."""
    for request in requests:
        request.request_id = f"request-{next(numbers)}"
    return requests


def measure(connectors: dict[str, Connector], rounds: int) -> dict[str, Times]:
    """Let the connectors take turns; medians."""
    waiting, (whole,) = _requests(NUM_WAITING, WAITING_TOKENS), _requests(1, SAVED_TOKENS)
    numbers = iter(range(1 << 40))
    found: dict[str, list[Times]] = {name: [] for name in connectors}
    for number in range(rounds + 1):
        for name, connector in connectors.items():
            TimedStore.seconds = STORE_SECONDS
            step, answered = connector.wait_for_answers(_named(waiting, numbers))
            TimedStore.seconds = 0.0
            hand_over, saved = connector.save(_named([whole], numbers)[0])
            if number:  # the first round meets everything for the first time
                found[name].append(Times(step, answered, hand_over, saved))
    return {
        name: Times(
            *(statistics.median(column) for column in zip(*(asdict(one).values() for one in times), strict=True))
        )
        for name, times in found.items()
    }


def main() -> int:
    """Print the table; 1 when a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, after one that is not counted")
    parser.add_argument("--json", type=Path, help="also write the medians to this file")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        undo = _prepare(Path(name))
        try:
            cache_config = _cache_config()
            connectors = {kind: Connector(options, Path(name), cache_config) for kind, options in NAMES.items()}
            medians = measure(connectors, args.rounds)
            for connector in connectors.values():
                connector.close()
        finally:
            undo()
    print(
        f"{NUM_WAITING} waiting requests of {WAITING_TOKENS:,} tokens, a store of {STORE_SECONDS * 1e3:g} ms per call;"
    )
    print(f"a save of {SAVED_TOKENS // BLOCK_SIZE:,} chunks x {NUM_LAYERS} regions; medians of {args.rounds}, in ms")
    print(f"{'':<26}{'first step':>12}{'all answered':>14}{'hand over':>12}{'saved':>10}")
    for kind, times in medians.items():
        print(f"{kind:<26}{times.step:>12.1f}{times.answered:>14.1f}{times.hand_over:>12.2f}{times.saved:>10.1f}")
    reference, ours = medians["reference"], medians["ours"]
    print(
        f"{'reference / ours':<26}{reference.step / ours.step:>12.1f}{reference.answered / ours.answered:>14.1f}"
        f"{reference.hand_over / ours.hand_over:>12.2f}{reference.saved / ours.saved:>10.1f}"
    )
    if args.json:
        args.json.write_text(json.dumps({kind: asdict(times) for kind, times in medians.items()}, indent=2))
    is_good = ours.step < STEP_BAR_MS and ours.saved < reference.saved
    print("" if is_good else f"NOT met: a step below {STEP_BAR_MS:g} ms, and a save faster than the reference's")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
