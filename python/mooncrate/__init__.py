"""Keeps the KV cache of LLM inference engines in a shared Mooncake Store pool."""

from mooncrate._core import LookupPlan, TransferPlan
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
