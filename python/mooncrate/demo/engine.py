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
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mooncrate import mooncake
from mooncrate.data import BlobBlockHashes
from mooncrate.demo.kv_cache import PagedKVCache
from mooncrate.demo.settings import Settings
from mooncrate.errors import StoreError
from mooncrate.store import GuardedStore, describe

MAX_ADDRESSES: Final = 2048
"""Addresses per call. More of them in flight stall over TCP unless the limit of its queue could be raised."""
LOCAL_BUFFER_BYTES: Final = 16 << 20


class Engine:
    """Tensors, a store client, and the two jobs."""

    def __init__(self, settings: Settings) -> None:
        """Allocates, connects and registers.

        Raises:
            StoreError: No client, a device that the wheel cannot reach, or a refused registration.
        """
        self._workload = settings.workload
        self._block_ids = self._workload.block_ids(settings.name)
        self.cache = PagedKVCache(self._workload, self._block_ids, _choose_device(settings.device))
        if settings.is_saving:
            self.cache.fill()
        if settings.is_tampering:
            self.cache.flip_byte()
        self._store = mooncake.connect(
            settings.master_address, segment_bytes=settings.segment_bytes, local_buffer_bytes=LOCAL_BUFFER_BYTES
        )
        self._database = self._workload.database()
        self._database.set_kv_caches_base_addr([layer.data_ptr() for layer in self.cache.layers])
        self._database.set_block_len([self._workload.block_bytes])
        self._register(self._store)

    def save(self) -> dict[str, Any]:
        """Puts what the store does not have.

        Raises:
            StoreError: A chunk could not be put.
        """
        hashes = self._workload.block_hashes()
        start = time.perf_counter()
        chunks, keys = self._chunks(hashes)
        missing = [index for index, answer in enumerate(self._exists(keys)) if answer != 1]
        keys = [keys[index] for index in missing]
        addrs, sizes, _ = self._database.prepare_values([chunks[index] for index in missing], self._block_ids)
        for part in self._batches(len(keys)):
            codes = self._store.batch_put_from_multi_buffers(keys[part], addrs[part], sizes[part])
            _check("put", keys[part], codes, expected=0)
        return {"num_chunks": len(keys), "seconds": time.perf_counter() - start}

    def load(self) -> dict[str, Any]:
        """Finds the prefix in the store, gets it, and compares every byte.

        Raises:
            StoreError: A chunk that was found could not be got in full.
        """
        hashes = BlobBlockHashes(memoryview(b"".join(self._workload.block_hashes())), 32)
        start = time.perf_counter()
        chunks, keys = self._chunks(hashes)
        num_found = _prefix_len(self._exists(keys))
        keys = keys[:num_found]
        addrs, sizes, _ = self._database.prepare_values(chunks[:num_found], self._block_ids)
        for part in self._batches(num_found):
            codes = self._store.batch_get_into_multi_buffers(keys[part], addrs[part], sizes[part])
            _check("get", keys[part], codes, expected=self._workload.row_bytes)
        self.cache.synchronize()
        seconds = time.perf_counter() - start
        wrong = self.cache.find_wrong_byte() if num_found == len(chunks) else None
        return {"num_found": num_found, "seconds": seconds, "wrong": str(wrong) if wrong else ""}

    def close(self) -> None:
        """Closes the client; the tensors go after it, because it may still touch them."""
        self._store.close()

    def _register(self, store: GuardedStore) -> None:
        for layer in self.cache.layers:
            code = store.register_buffer(layer.data_ptr(), layer.nbytes)
            if code != 0:
                raise StoreError(f"registering {layer.nbytes} bytes of {self.cache.device} failed: {describe(code)}")

    def _chunks(self, hashes: Sequence[bytes | memoryview]) -> tuple[list[tuple[int, int]], list[str]]:
        """Returns ``(token_start, token_end)`` of each chunk of the prompt, and its key."""
        chunks = list(self._database.process_tokens(self._workload.cached_tokens, hashes))
        keys = self._database.keys_for([chunk_hash for _, _, chunk_hash in chunks])
        return [(token_start, token_end) for token_start, token_end, _ in chunks], keys

    def _exists(self, keys: list[str]) -> list[int]:
        answers = self._store.batch_is_exist(keys)
        if len(answers) != len(keys) or min(answers) < 0:
            raise StoreError(f"exists failed for {len(keys)} keys: {sum(answer < 0 for answer in answers)} errors")
        return answers

    def _batches(self, num_chunks: int) -> Iterator[slice]:
        step = max(1, MAX_ADDRESSES // self._workload.num_layers)
        return (slice(start, start + step) for start in range(0, num_chunks, step))


def _choose_device(device: str) -> str:
    """Keeps device memory away from a wheel that would dereference its addresses."""
    wheel = mooncake.capabilities()
    if wheel.has_device_memory:
        return device
    if device.startswith("cuda"):
        raise StoreError(f"{wheel.distribution} cannot move CUDA memory: install the wheel for your CUDA version")
    return "cpu"


def _prefix_len(exists: Sequence[int]) -> int:
    return next((index for index, answer in enumerate(exists) if answer != 1), len(exists))


def _check(call: str, keys: list[str], codes: list[int], *, expected: int) -> None:
    """Takes a batch for done only if every key got the expected answer; a short list is a failure, too."""
    if len(codes) != len(keys):
        raise StoreError(f"{call} gave {len(codes)} answers for {len(keys)} keys")
    for key, code in zip(keys, codes, strict=True):
        if code != expected:
            answer = describe(code) if code < 0 else f"{code} instead of {expected}"
            raise StoreError(f"{call} of {key} answered {answer}")


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
        answer("failed", message=text if isinstance(error, StoreError) else f"{type(error).__name__}: {text}")
        os._exit(1)
    os._exit(0)  # past the library's exit handlers and whatever its threads still do


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
