"""Puts other classes in place of those of the data module of vLLM's Mooncake store connector.

The connector's modules take their names with ``from ...data import X``. Replacing the attributes of the data module
therefore works only before any of them is imported, and silently does nothing afterwards: `replace` refuses then, and
`defining_modules` and `holders` show what the connector really holds.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Final

STORE_PACKAGE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"
DATA_MODULE: Final = f"{STORE_PACKAGE}.data"
USER_MODULES: Final = tuple(f"{STORE_PACKAGE}.{name}" for name in ("coordinator", "worker", "scheduler", "connector"))
NAMES: Final = (
    "BlobBlockHashes",
    "_CompactChunkHashList",
    "chunk_hashes_for_block_size",
    "KeyMetadata",
    "PoolKey",
    "ChunkedTokenDatabase",
    "LoadSpec",
    "RequestTracker",
    "ReqMeta",
    "MooncakeStoreConnectorMetadata",
)


def originals() -> dict[str, object]:
    """Return what vLLM's data module now holds under `NAMES`."""
    data = import_module(DATA_MODULE)
    return {name: getattr(data, name) for name in NAMES}


def replace(module_name: str) -> None:
    """Replace every name in `NAMES` of vLLM's data module by the one of the same name in another module.

    Args:
        module_name: Where the replacements come from, for example ``mooncrate.data``.

    Raises:
        RuntimeError: A module of the connector is loaded already, and so holds the classes it was loaded with.
        AttributeError: The other module lacks a name.
    """
    loaded = [name for name in USER_MODULES if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded} were imported before the replacement")
    replacement = import_module(module_name)
    replacements = {name: getattr(replacement, name) for name in NAMES}
    data = import_module(DATA_MODULE)
    for name, value in replacements.items():
        setattr(data, name, value)


def defining_modules() -> dict[str, str]:
    """Return, for each replaceable name that a module of the connector holds, the module that defines its value.

    The keys are ``<last part of the module>.<name>``, for example ``worker.PoolKey``.
    """
    found = {}
    for user in USER_MODULES:
        held = vars(import_module(user))
        for name in NAMES:
            if name in held:
                found[f"{user.rpartition('.')[2]}.{name}"] = str(held[name].__module__)
    return found


def holders(values: Mapping[str, object]) -> list[str]:
    """Return the ``module.attribute`` of vLLM at which one of the given objects can be reached."""
    identities = {id(value) for value in values.values()}
    return [
        f"{module_name}.{attribute}"
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "vllm"
        for attribute, held in list(getattr(module, "__dict__", {}).items())
        if id(held) in identities
    ]
