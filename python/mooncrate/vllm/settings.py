"""What an operator set: ``kv_role`` and ``kv_connector_extra_config``, under the names of vLLM's own connector.

Whoever switches over keeps the file and the names. What does not exist here is refused with its name: an option that
was passed over would change keys, memory or failures without a word.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from mooncrate.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
SEGMENT_VARIABLE: Final = "MOONCAKE_PREFERRED_SEGMENT"
SOURCE: Final = "kv_connector_extra_config"

UNSUPPORTED: Final = {
    "lookup_rpc_port": "the scheduler asks the store itself, there is no socket",
    "store_tp_size": "objects are laid out as on each rank",
    "enable_store_tp_lcm": "objects are laid out as on each rank",
    "prefill_tp_sizes": "objects are laid out as on each rank",
    "custom_mem_pool": "the KV cache lies where vLLM puts it",
    "enable_group_semantics": "objects have no group ids",
    "enable_cross_layers_blocks": "objects are laid out as on each rank",
}
"""Options of vLLM's connector that have no counterpart here, and why."""


@dataclass(frozen=True)
class Settings:
    """What was set, checked.

    Attributes:
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        cache_prefix: In front of every key.
        load_async: Whether requests wait for their load beside the running ones, and not in the step.
        enable_lookup: Whether the pool is asked for prefixes.
        save_decode_cache: Whether what is generated is saved, and not only what is prefilled.
        preferred_segment: Where in the pool objects should lie, if that was said.
    """

    role: str
    cache_prefix: str = ""
    load_async: bool = True
    enable_lookup: bool = True
    save_decode_cache: bool = False
    preferred_segment: str | None = None

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Self:
        """Reads them.

        Raises:
            ConfigError: A value cannot be meant, or a name is unknown or not supported.
        """
        transfer_config = vllm_config.kv_transfer_config
        role = transfer_config.kv_role
        if role not in ROLES:
            raise ConfigError(f"kv_role: {role!r}: not one of {', '.join(ROLES)}")
        values = dict(transfer_config.kv_connector_extra_config)
        settings = cls(
            role=role,
            cache_prefix=str(values.pop("cache_prefix", "")),
            load_async=_take_bool(values, "load_async", True),
            enable_lookup=_take_bool(values, "enable_lookup", True),
            save_decode_cache=_take_bool(values, "save_decode_cache", False),
            preferred_segment=_take_segment(values),
        )
        if not _take_bool(values, "lookup_async", True):
            raise ConfigError(f"{SOURCE}: lookup_async: false: lookups never block a step here: leave it out")
        _refuse(values)
        return settings

    @property
    def saves_prefill(self) -> bool:
        """Whether what is prefilled is saved."""
        return self.role != "kv_consumer"

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return self.saves_prefill or self.save_decode_cache

    @property
    def is_capacity_only(self) -> bool:
        """Whether this engine gives memory to the pool, and moves nothing."""
        return not self.saves and not self.enable_lookup


def _take_bool(values: dict[str, Any], name: str, default: bool) -> bool:
    value = values.pop(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{SOURCE}: {name}: {value!r}: neither true nor false")
    return value


def _take_segment(values: dict[str, Any]) -> str | None:
    name = "preferred_segment"
    value = values.pop(name, None)
    if value is None:
        return os.environ.get(SEGMENT_VARIABLE, "").strip() or None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{SOURCE}: {name}: {value!r}: not the name of a segment")
    return value.strip()


def _refuse(values: Mapping[str, Any]) -> None:
    """Refuses what is left, but for what is off anyway."""
    known = [name for name in Settings.__dataclass_fields__ if name != "role"]
    for name, value in values.items():
        if name not in UNSUPPORTED:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(known)}"
            raise ConfigError(f"{SOURCE}: {name}: unknown name{hint}")
        if value and str(value).lower() != "false":
            raise ConfigError(f"{SOURCE}: {name}: {value!r}: not supported by MooncrateConnector: {UNSUPPORTED[name]}")
