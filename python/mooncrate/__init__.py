"""Keeps the KV cache of LLM inference engines in a shared Mooncake Store pool."""
