"""Where the store's settings come from, and what is said about those that cannot be meant."""

import doctest
import json
import pickle
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncrate import config, mooncake
from mooncrate.config import IGNORED_FIELDS, StoreConfig, StoreConnection, find_host
from mooncrate.errors import ConfigError, MooncrateError, StoreError
from mooncrate.master import MasterProcess
from mooncrate.store import GuardedStore
from processes import is_running

GIB = 1 << 30
MASTER = {"master_server_address": "127.0.0.1:50051"}
WriteFile = Callable[[object], Path]


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    """Writes a JSON file, or text as it is, and returns its path."""

    def write(content: object) -> Path:
        path = tmp_path / "mooncake.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_the_examples_in_the_docstrings_run() -> None:
    failed, attempted = doctest.testmod(config)
    assert attempted
    assert not failed


# The JSON of existing deployments.


def test_the_file_of_a_vllm_deployment_means_what_it_means_there(write_file: WriteFile) -> None:
    path = write_file(
        {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "10.0.0.1:50051",
            "global_segment_size": "80GB",
            "local_buffer_size": "4GB",
            "protocol": "rdma",
            "device_name": "",
        }
    )
    read = StoreConfig.from_file(path)
    assert read.master_server_address == "10.0.0.1:50051"
    assert (read.global_segment_size, read.local_buffer_size) == (80 * GIB, 4 * GIB)
    assert (read.protocol, read.device_name, read.metadata_server) == ("rdma", "", "P2PHANDSHAKE")
    assert (read.mode, read.enable_offload, read.tenant_id) == ("embedded", False, "default")
    assert not read.owns_master


def test_what_a_file_leaves_out_has_vllms_defaults() -> None:
    read = StoreConfig.from_mapping(MASTER)
    assert (read.global_segment_size, read.local_buffer_size) == (4 * GIB, 4 * GIB)
    assert (read.protocol, read.device_name, read.mode) == ("rdma", "", "embedded")
    assert (read.enable_offload, read.tenant_id) == (False, "default")


def test_a_standalone_store_contributes_nothing() -> None:
    values = {**MASTER, "mode": "standalone-store", "global_segment_size": 0, "enable_offload": True}
    read = StoreConfig.from_mapping(values)
    assert (read.mode, read.global_segment_size, read.enable_offload) == ("standalone-store", 0, True)


def test_names_for_other_readers_are_passed_over(write_file: WriteFile) -> None:
    assert StoreConfig.from_file(write_file({**MASTER, **dict.fromkeys(IGNORED_FIELDS, "x")})) == (
        StoreConfig.from_mapping(MASTER)
    )
    assert not IGNORED_FIELDS.keys() & StoreConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("value", "tenant_id"), [(None, "default"), ("", "default"), ("  ", "default"), (" team ", "team")]
)
def test_a_blank_tenant_is_the_default_one(value: object, tenant_id: str) -> None:
    assert StoreConfig.from_mapping({**MASTER, "tenant_id": value}).tenant_id == tenant_id


@pytest.mark.parametrize(
    ("value", "is_true"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("false", False),
        ("False", False),
        ("0", False),
        ("1", True),
        ("no", False),
        ("off", False),
        (0, False),
        (1, True),
        (None, False),
    ],
)
def test_false_in_quotes_is_not_true(value: object, is_true: bool) -> None:
    assert StoreConfig.from_mapping({**MASTER, "enable_offload": value}).enable_offload is is_true


def test_names_are_trimmed_and_protocols_are_lower_case_as_mooncake_wants_them() -> None:
    values = {"master_server_address": " h:1 ", "protocol": " RDMA ", "device_name": " mlx5_0 "}
    read = StoreConfig.from_mapping(values)
    assert (read.master_server_address, read.protocol, read.device_name) == ("h:1", "rdma", "mlx5_0")


def test_sizes_in_a_file_do_not_go_through_floats(write_file: WriteFile) -> None:
    text = '{"master_server_address": "h:1", "global_segment_size": 9007199254740993.0}'
    assert StoreConfig.from_file(write_file(text)).global_segment_size == 2**53 + 1


# What is refused, and how.


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"enable_offload": "maybe"}, "enable_offload: 'maybe': input should be a valid boolean"),
        ({"enable_offload": 2}, "enable_offload: 2: input should be a valid boolean"),
        ({"mode": "Embedded"}, "mode: 'Embedded': input should be 'embedded' or 'standalone-store'"),
        ({"mode": None}, "mode: None: input should be"),
        ({"master_server_address": " "}, "master_server_address: ' ': string should have at least 1 character"),
        ({"master_server_address": 5}, "master_server_address: 5: input should be a valid string"),
        ({"metadata_server": ""}, "metadata_server: '': string should have at least 1 character"),
        ({"protocol": ""}, "protocol: '': string should have at least 1 character"),
        ({"device_name": None}, "device_name: None: input should be a valid string"),
        ({"tenant_id": 7}, "tenant_id: 7: input should be a valid string"),
        ({"local_buffer_size": 0}, "local_buffer_size: 0: a client needs a staging buffer"),
        ({"global_segment_size": "0B"}, "global_segment_size: '0B': mode 'embedded' contributes memory"),
        ({"mode": "standalone-store"}, "global_segment_size: 4294967296: mode 'standalone-store' contributes no mem"),
        ({"global_segment_size": float("inf")}, "global_segment_size: inf is not a size"),
        ({"master_server_addres": "h:1"}, "master_server_addres: unknown name, did you mean 'master_server_address'?"),
        ({"GLOBAL_SEGMENT_SIZE": 1}, "GLOBAL_SEGMENT_SIZE: unknown name, did you mean 'global_segment_size'?"),
        ({"localhostname": 1}, "localhostname: unknown name, did you mean 'local_hostname'?"),
        ({"xyz": 1}, "xyz: unknown name; known: master_server_address, metadata_server, protocol,"),
        ({"_owns_master": True}, "_owns_master: unknown name"),
        ({"source": "x"}, "source: unknown name"),
        ({"self": "x"}, "self: unknown name"),
    ],
)
def test_messages_name_file_field_and_value_in_one_line(
    values: dict[str, object], complaint: str, write_file: WriteFile
) -> None:
    path = write_file({**MASTER, **values})
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {complaint}")) as caught:
        StoreConfig.from_file(path)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__  # no traceback of the validation library before ours
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MooncrateError)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig.from_mapping({"protocol": 1, "gobal_segment_size": 2})
    parts = str(caught.value).split("; ")
    assert [part.split(":")[1].strip() for part in parts] == ["master_server_address", "protocol", "gobal_segment_size"]


def test_names_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="mapping: 5: names are strings"):
        StoreConfig.from_mapping({**MASTER, 5: 6})  # type: ignore[dict-item]


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig.from_mapping({**MASTER, "mode": "x" * 1000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "not JSON: Expecting value: line 1 column 1"),
        ("{", "not JSON: "),
        ('{"a": 1,}', "not JSON: .* line 1 column"),
        ("[]", r"not a JSON object, but a list: \[\]"),
        ("5", "not a JSON object, but a int: 5"),
        ('{"global_segment_size": ' + "9" * 5000 + "}", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(content: str, complaint: str, write_file: WriteFile) -> None:
    path = write_file(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {complaint}"):
        StoreConfig.from_file(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.json"
    with pytest.raises(ConfigError, match=f"{missing}: cannot be read: No such file or directory"):
        StoreConfig.from_file(missing)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        StoreConfig.from_file(tmp_path)
    missing.write_bytes(b'{"\xff": 1}')
    with pytest.raises(ConfigError, match="not JSON: 'utf-8' codec"):
        StoreConfig.from_file(missing)


def test_the_environment_names_the_file(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set"):
        StoreConfig.from_env()
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", "")
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set"):
        StoreConfig.from_env()
    path = write_file(MASTER)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert StoreConfig.from_env() == StoreConfig.from_file(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"\(MOONCAKE_CONFIG_PATH\): master_server_address: missing"):
        StoreConfig.from_env()


# The object.


def test_it_is_immutable_hashable_and_can_be_pickled() -> None:
    for made in (StoreConfig.from_mapping(MASTER), StoreConfig.embedded()):
        copy = pickle.loads(pickle.dumps(made))
        assert copy == made
        assert hash(copy) == hash(made)
        assert copy.owns_master == made.owns_master
        with pytest.raises(ValueError, match="frozen"):
            made.protocol = "tcp"


def test_the_constructor_checks_as_well() -> None:
    with pytest.raises(ConfigError, match="StoreConfig: local_buffer_size: '4XB' is not a size"):
        StoreConfig(**MASTER, local_buffer_size="4XB")
    with pytest.raises(ConfigError, match=r"StoreConfig.embedded\(\): global_segment_size: '-1' is not a size"):
        StoreConfig.embedded(global_segment_size="-1")


def test_embedded_is_not_what_the_same_values_in_a_file_would_be() -> None:
    ours = StoreConfig.embedded()
    assert ours.owns_master
    assert ours != StoreConfig.from_mapping(ours.model_dump())


# Connecting.


@pytest.fixture
def connect_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Takes the place of `mooncake.connect`, and holds the arguments of the last call."""
    arguments: dict[str, object] = {}

    def connect(address: str, **options: object) -> None:
        arguments.clear()
        arguments.update(options, address=address)

    monkeypatch.setattr(mooncake, "connect", connect)
    monkeypatch.delenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", raising=False)
    return arguments


def test_the_settings_arrive_at_the_client(connect_arguments: dict[str, object]) -> None:
    values = {
        **MASTER,
        "metadata_server": "http://m:8080/metadata",
        "protocol": "tcp",
        "device_name": "d",
        "tenant_id": "team",
        "global_segment_size": "2GB",
        "local_buffer_size": "1GB",
    }
    StoreConfig.from_mapping(values).connect()
    assert connect_arguments == {
        "address": "127.0.0.1:50051",
        "segment_bytes": 2 * GIB,
        "local_buffer_bytes": GIB,
        "host": "127.0.0.1",
        "protocol": "tcp",
        "devices": "d",
        "metadata_server": "http://m:8080/metadata",
        "tenant_id": "team",
    }


def test_a_client_that_only_looks_up_needs_little(connect_arguments: dict[str, object]) -> None:
    StoreConfig.from_mapping(MASTER).connect(contributes_memory=False, host="here")
    assert (connect_arguments["segment_bytes"], connect_arguments["local_buffer_bytes"]) == (0, 16 << 20)
    assert connect_arguments["host"] == "here"
    StoreConfig.from_mapping({**MASTER, "local_buffer_size": 9}).connect(contributes_memory=False)
    assert connect_arguments["local_buffer_bytes"] == 9


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "127.0.0.1", "etcd://127.0.0.1:2379;127.0.0.2:2379"])
def test_the_host_is_where_packets_to_the_master_leave(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", raising=False)
    assert find_host(address) == "127.0.0.1"
    monkeypatch.setenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", " node7 ")
    assert find_host(address) == "node7"


def test_a_host_that_cannot_be_found_out_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", raising=False)

    def fail(*_args: object, **_options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(
        ConfigError, match=r"nowhere:1 \(Name or service not known\): set MOONCAKE_REQUESTER_LOCAL_HOST"
    ):
        find_host("nowhere:1")


def test_a_tenant_needs_a_wheel_that_knows_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Store:
        def setup(self, *args: object, **options: object) -> int:
            seen.extend([len(args), options])
            return 0

        def close(self) -> int:
            return 0

    class Module:
        MooncakeDistributedStore = Store

    wheel = mooncake.capabilities()
    monkeypatch.setattr(mooncake, "_import_store", lambda: Module)
    monkeypatch.setattr(mooncake, "capabilities", lambda: replace(wheel, has_tenants=True))
    mooncake.connect("etcd://h:1", tenant_id="team")
    mooncake.connect("etcd://h:1")
    assert seen == [7, {"tenant_id": "team"}, 7, {}]
    monkeypatch.setattr(mooncake, "capabilities", lambda: replace(wheel, has_tenants=False))
    with pytest.raises(StoreError, match="knows no tenants, so 'team' cannot be kept apart"):
        mooncake.connect("etcd://h:1", tenant_id="team")
    assert len(seen) == 4


def test_a_pool_for_this_process_alone_starts_and_ends_with_the_connection() -> None:
    connection = StoreConfig.embedded(global_segment_size="32MiB").connect()
    assert connection.master is not None
    pid = connection.master.pid
    memory = np.ones(1 << 20, np.uint8)
    with connection as store:
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        keys = [f"{index}" for index in range(40)]
        codes = store.batch_put_from_multi_buffers(keys, [[memory.ctypes.data]] * 40, [[memory.nbytes]] * 40)
        assert codes == [0] * 32 + [-200] * 8
        assert is_running(pid)
    assert not is_running(pid)
    connection.close()
    with pytest.raises(StoreError, match=r"after close\(\)"):
        connection.store.batch_is_exist(keys)


def test_a_master_that_was_started_in_vain_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    masters: list[MasterProcess] = []

    class Recorded(MasterProcess):
        def start(self) -> None:
            super().start()
            masters.append(self)

    def fail(_address: str, **_options: object) -> None:
        raise StoreError("set-up failed")

    monkeypatch.setattr(config, "MasterProcess", Recorded)
    monkeypatch.setattr(mooncake, "connect", fail)
    with pytest.raises(StoreError, match="set-up failed"):
        StoreConfig.embedded().connect()
    (master,) = masters
    assert not master.is_alive()


def test_the_master_is_stopped_also_when_the_store_does_not_close() -> None:
    class Stuck(GuardedStore):
        def close(self, timeout: float = 0.0) -> int:
            raise StoreError(f"not closed after {timeout:g} s")

    with MasterProcess() as master:
        connection = StoreConnection(Stuck(None), master)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="not closed after 2 s"):
            connection.close(2.0)
        assert not master.is_alive()
