"""Keeps the KV cache of LLM inference engines in a shared Mooncake Store pool."""

from mooncrate._core import LookupPlan, TransferPlan

__all__ = ["LookupPlan", "TransferPlan"]
