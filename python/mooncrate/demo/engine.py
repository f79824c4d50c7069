"""One engine of the demo, a process of its own: ``python -m mooncrate.demo.engine SETTINGS``.

It reads commands from standard input (``save``, ``load``, ``stop``, one per line) and answers each with one line of
JSON on standard output. It ends at once when standard input ends, so no engine outlives the demo, however that dies.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any, Final

from mooncrate import CacheGroup, KVPool, StoreConfig, mooncake
from mooncrate.data import BlobBlockHashes, LoadSpec, ReqMeta
from mooncrate.demo.kv_cache import PagedKVCache
from mooncrate.demo.settings import Settings
from mooncrate.errors import MooncrateError, StoreError
from mooncrate.store import describe

LOCAL_BUFFER_BYTES: Final = 16 << 20


class Engine:
    """Tensors, a pool, and the two jobs."""

    def __init__(self, settings: Settings) -> None:
        """Allocates, connects and registers.

        Raises:
            StoreError: No client, a device that the wheel cannot reach, or a refused registration.
        """
        workload = self._workload = settings.workload
        self._block_ids = workload.block_ids(settings.name)
        self.cache = PagedKVCache(workload, self._block_ids, _choose_device(settings.device))
        if settings.is_saving:
            self.cache.fill()
        if settings.is_tampering:
            self.cache.flip_byte()
        self._pool = KVPool.open(
            _store_config(settings),
            model_name="mooncrate-demo",
            groups=[CacheGroup.full_attention(workload.block_size)],
            null_block_id=None,  # this engine hands out every block, the first one too
        )
        layers = {f"layer{number}": layer for number, layer in enumerate(self.cache.layers)}
        self._pool.register_kv_caches(layers, workload.num_blocks, block_dim=0)

    def save(self) -> dict[str, Any]:
        """Saves what the pool does not have.

        Raises:
            StoreError: A chunk could not be saved.
        """
        hashes = self._workload.block_hashes()
        start = time.perf_counter()
        request = ReqMeta("prompt", self._workload.cached_tokens, (self._block_ids,), hashes)
        result = self._pool.save(request).result()
        seconds = time.perf_counter() - start
        if not result.is_complete:
            first = (
                f", chunk {result.failed[0].chunk_id} with {describe(result.failed[0].code)}" if result.failed else ""
            )
            raise StoreError(
                f"{len(result.failed)} of {result.num_chunks} chunks were not saved{first}"
            ) from result.error
        return {"num_chunks": result.num_saved, "seconds": seconds}

    def load(self) -> dict[str, Any]:
        """Finds the prefix in the pool, loads it, and compares every byte.

        Raises:
            StoreError: A chunk that was found could not be loaded in full.
        """
        workload = self._workload
        hashes = BlobBlockHashes(b"".join(workload.block_hashes()), 32)
        start = time.perf_counter()
        # As with one more token than is cached: the last one of a prompt is never found.
        num_tokens = self._pool.lookup(workload.cached_tokens + 1, hashes)
        if num_tokens:
            request = ReqMeta("prompt", 0, (self._block_ids,), hashes, load_spec=LoadSpec(0, num_tokens, can_load=True))
            result = self._pool.load(request).result()
            if not result.is_complete:
                codes = ", ".join(f"{count} with {describe(code)}" for code, count in result.codes.items())
                num_failed = len(result.failed_block_ids[0])
                raise StoreError(f"{num_failed} of {num_tokens // workload.block_size} chunks were not loaded: {codes}")
        self.cache.synchronize()
        seconds = time.perf_counter() - start
        wrong = self.cache.find_wrong_byte() if num_tokens == workload.cached_tokens else None
        num_found = num_tokens // workload.block_size
        return {"num_found": num_found, "seconds": seconds, "wrong": str(wrong) if wrong else ""}

    def close(self) -> None:
        """Closes the pool; the tensors go after it, because it may still touch them."""
        self._pool.close()


def _store_config(settings: Settings) -> StoreConfig:
    return StoreConfig.from_mapping(
        {
            "master_server_address": settings.master_address,
            "protocol": "tcp",
            "mode": "embedded" if settings.segment_bytes else "standalone-store",
            "global_segment_size": settings.segment_bytes,
            "local_buffer_size": LOCAL_BUFFER_BYTES,
        },
        source=f"engine {settings.name}",
    )


def _choose_device(device: str) -> str:
    """Keeps device memory away from a wheel that would dereference its addresses."""
    wheel = mooncake.capabilities()
    if wheel.has_device_memory:
        return device
    if device.startswith("cuda"):
        raise StoreError(f"{wheel.distribution} cannot move CUDA memory: install the wheel for your CUDA version")
    return "cpu"


def _read_commands(commands: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        commands.put(line.strip())
    os._exit(1)  # the demo is gone


def _claim_stdout() -> int:
    """Returns a descriptor for answers, and sends whatever libraries print to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def main(settings: Settings) -> None:
    """Runs one engine until it is told to stop."""
    answers = _claim_stdout()

    def answer(event: str, **fields: object) -> None:
        os.write(answers, (json.dumps({"event": event, **fields}) + "\n").encode())

    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    try:
        engine = Engine(settings)
        answer("ready", device=str(engine.cache.device))
        while (command := commands.get()) != "stop":
            if command == "save":
                answer("saved", **engine.save())
            elif command == "load":
                answer("loaded", **engine.load())
        engine.close()
    except Exception as error:  # the one place where a failure becomes the demo's message
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        answer("failed", message=text if isinstance(error, MooncrateError) else f"{type(error).__name__}: {text}")
        os._exit(1)
    os._exit(0)  # past the library's exit handlers and whatever its threads still do


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
