"""A connector that vLLM loads by name: ``"kv_connector_module_path": "mooncrate.vllm"``.

The only package here that imports vLLM. It translates: vLLM's groups, ranks and requests become those of
`mooncrate.pool.KVPool`, which does the work, and results become what vLLM wants to hear.
"""

from mooncrate.vllm.connector import MooncrateConnector

__all__ = ["MooncrateConnector"]
