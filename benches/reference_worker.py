"""vLLM's own worker code around the store, without an engine: its lookup, and its thread that saves.

Nothing is rewritten here. The functions are vLLM's; only what they read from ``self`` is set by hand.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"


def load(module: str) -> Any:  # noqa: ANN401 - vLLM is not typed, and not installed where types are checked
    """Import a module of vLLM's Mooncake connector; without vLLM the program ends with one line."""
    try:
        return import_module(f"{PACKAGE}.{module}")
    except ImportError as error:
        sys.exit(f"{sys.argv[0]}: no vLLM with a Mooncake connector to compare with ({error}); use `make bench`")


@dataclass
class FixedStore:
    """A store that does nothing: it has everything or nothing, and takes whatever it is given."""

    is_full: bool
    num_calls: int = 0
    num_keys: int = 0
    num_bytes: int = 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """The same answer for every key."""
        self.num_calls += 1
        self.num_keys += len(keys)
        return [int(self.is_full)] * len(keys)

    def batch_put_from_multi_buffers(
        self, keys: list[str], _addrs: object, _sizes: object, _config: object = None
    ) -> list[int]:
        """Success for every key."""
        self.num_calls += 1
        self.num_keys += len(keys)
        return [0] * len(keys)

    def register_buffer(self, _address: int, _num_bytes: int) -> int:
        """Success."""
        return 0

    def unregister_buffer(self, _address: int) -> int:
        """Success."""
        return 0


def make_coordinator(block_size: int) -> tuple[Any, list[Any]]:
    """Make vLLM's coordinator for one full-attention group, and the group."""
    interface = import_module("vllm.v1.kv_cache_interface")
    torch = import_module("torch")
    spec = interface.FullAttentionSpec(block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    groups = [interface.KVCacheGroupSpec(["layer"], spec)]
    return load("coordinator").MooncakeStoreCoordinator(groups, block_size, block_size), groups


class ReferenceLookup:
    """The worker's ``lookup`` over some rank namespaces."""

    def __init__(self, database: Any, key_prefixes: list[str], store: FixedStore) -> None:  # noqa: ANN401
        """Set what the function reads."""
        coordinator, groups = make_coordinator(database.block_size)
        self._lookup = load("worker").MooncakeStoreWorker.lookup
        self._self = SimpleNamespace(
            coord=coordinator,
            hash_block_size=database.hash_block_size,
            store=store,
            token_dbs=[database],
            _capacity_only=False,
            _kv_cache_groups=groups,
            _lookup_key_prefixes=[key_prefixes],
            _record_kv_connector_operation=lambda *_args, **_options: None,
        )

    def __call__(self, num_tokens: int, block_hashes: list[bytes]) -> int:
        """Tokens that can be loaded."""
        return int(self._lookup(self._self, num_tokens, block_hashes))
