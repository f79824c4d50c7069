"""What an operator can set, against vLLM's ``KVTransferConfig``: the same names and defaults, nothing passed over."""

from typing import Any

import pytest

from connector_parts import connector_module, vllm_config
from mooncrate.errors import ConfigError

pytestmark = pytest.mark.vllm_version("0.32.0")


def settings_of(**config: Any) -> Any:  # noqa: ANN401
    return connector_module("settings").Settings.of(vllm_config(**config))


def test_defaults_are_those_of_vllms_connector() -> None:
    settings = settings_of()
    assert (settings.cache_prefix, settings.load_async, settings.enable_lookup) == ("", True, True)
    assert (settings.save_decode_cache, settings.preferred_segment) == (False, None)


def test_every_option_that_exists_is_taken() -> None:
    extra = {
        "cache_prefix": "team-a",
        "load_async": False,
        "enable_lookup": False,
        "save_decode_cache": True,
        "preferred_segment": " 10.0.0.1:17000 ",
        "lookup_async": True,
    }
    settings = settings_of(role="kv_producer", extra=extra)
    assert settings == connector_module("settings").Settings(
        "kv_producer", "team-a", False, False, True, "10.0.0.1:17000"
    )


def test_the_segment_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PREFERRED_SEGMENT", "10.0.0.2:17000")
    assert settings_of().preferred_segment == "10.0.0.2:17000"
    assert settings_of(extra={"preferred_segment": "other"}).preferred_segment == "other"


@pytest.mark.parametrize(
    ("role", "save_decode_cache", "saves_prefill", "saves"),
    [
        ("kv_producer", False, True, True),
        ("kv_both", False, True, True),
        ("kv_consumer", False, False, False),
        ("kv_consumer", True, False, True),
    ],
)
def test_what_each_role_saves(role: str, save_decode_cache: bool, saves_prefill: bool, saves: bool) -> None:
    settings = settings_of(role=role, extra={"save_decode_cache": save_decode_cache})
    assert (settings.saves_prefill, settings.saves) == (saves_prefill, saves)


def test_a_consumer_that_does_not_look_up_gives_memory_alone() -> None:
    assert settings_of(role="kv_consumer", extra={"enable_lookup": False}).is_capacity_only
    assert not settings_of(role="kv_consumer").is_capacity_only
    assert not settings_of(extra={"enable_lookup": False}).is_capacity_only


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"load_async": "false"}, "load_async: 'false': neither true nor false"),
        ({"enable_lookup": 1}, "enable_lookup: 1: neither true nor false"),
        ({"cache_prefx": "x"}, "cache_prefx: unknown name, did you mean 'cache_prefix'?"),
        ({"zzz": 1}, "zzz: unknown name; known: cache_prefix"),
        ({"preferred_segment": " "}, "preferred_segment: ' ': not the name of a segment"),
        ({"lookup_async": False}, "lookup_async: false: lookups never block"),
        ({"store_tp_size": 8}, "store_tp_size: 8: not supported"),
        ({"enable_store_tp_lcm": True}, "enable_store_tp_lcm: True: not supported"),
        ({"prefill_tp_sizes": [2, 4]}, r"prefill_tp_sizes: \[2, 4\]: not supported"),
        ({"custom_mem_pool": "NVLINK"}, "custom_mem_pool: 'NVLINK': not supported"),
        ({"enable_group_semantics": "true"}, "enable_group_semantics: 'true': not supported"),
        ({"lookup_rpc_port": 7}, "lookup_rpc_port: 7: not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(extra=extra)


def test_what_is_off_anyway_is_no_reason_to_refuse() -> None:
    settings_of(extra={"store_tp_size": None, "custom_mem_pool": "", "enable_group_semantics": "False"})
