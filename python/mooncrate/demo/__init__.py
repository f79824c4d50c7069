"""``python -m mooncrate.demo``: KV cache saved by one process, found and loaded by another, through a real store."""
