"""Keeps the KV cache of LLM inference engines in a shared Mooncake Store pool."""

from importlib import import_module
from typing import TYPE_CHECKING

from mooncrate._core import LookupPlan, TransferPlan

if TYPE_CHECKING:
    from mooncrate.config import StoreConfig
    from mooncrate.groups import CacheGroup, RankTopology
    from mooncrate.namespace import Namespace
    from mooncrate.pacing import PoolLimits
    from mooncrate.pool import KVPool
    from mooncrate.results import LoadResult, SaveResult

__all__ = [
    "CacheGroup",
    "KVPool",
    "LoadResult",
    "LookupPlan",
    "Namespace",
    "PoolLimits",
    "RankTopology",
    "SaveResult",
    "StoreConfig",
    "TransferPlan",
]

_MODULES = {
    "CacheGroup": "groups",
    "KVPool": "pool",
    "LoadResult": "results",
    "Namespace": "namespace",
    "PoolLimits": "pacing",
    "RankTopology": "groups",
    "SaveResult": "results",
    "StoreConfig": "config",
}
"""Where each name comes from when it is first asked for: the data layer alone starts without what settings need."""


def __getattr__(name: str) -> object:
    """Import what a name stands for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"mooncrate.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
