"""Connecting: what is said when something is missing, and what the environment gets. No Mooncake is needed."""

import importlib
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mooncrate import mooncake
from mooncrate.errors import StoreError


class FakeStore:
    """Set-up that answers with `code`, and sees the environment that a real client would read."""

    code = 0
    seen: tuple[tuple[object, ...], dict[str, str]] = ((), {})

    def setup(self, *args: object) -> int:
        type(self).seen = (args, dict(os.environ))
        return self.code


@pytest.fixture
def fake_store(monkeypatch: pytest.MonkeyPatch) -> type[FakeStore]:
    """Stands in for the class of the library, in an environment where no variable is set."""

    class Fresh(FakeStore):
        pass

    for name in mooncake.ENVIRONMENT_DEFAULTS:
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(mooncake, "_import_store", lambda: SimpleNamespace(MooncakeDistributedStore=Fresh))
    return Fresh


@pytest.fixture
def address() -> Iterator[str]:
    """Something listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), "pip install mooncake-transfer-engine"),
        (ModuleNotFoundError("No module named 'mooncake.store'", name="mooncake.store"), "pip install mooncake-"),
        (ModuleNotFoundError("No module named 'msgpack'", name="msgpack"), "pip install msgpack"),
        (ImportError("libibverbs.so.1: cannot open"), "`apt-get install libibverbs1 librdmacm1 libnuma1`"),
        (ImportError("librdmacm.so.1: cannot open"), "`apt-get install libibverbs1 librdmacm1 libnuma1`"),
        (ImportError("libnuma.so.1: cannot open"), "`apt-get install libibverbs1 librdmacm1 libnuma1`"),
        (ImportError("libcudart.so.12: cannot open"), "install the wheel that fits this machine"),
        (ImportError("something\nelse"), r"\(something else\).*pip install mooncake-transfer-engine"),
    ],
)
def test_a_failed_import_is_one_line_that_says_what_to_do(
    error: ImportError, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(StoreError, match=remedy) as caught:
        mooncake.connect("127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_a_dead_address_is_refused_at_once(fake_store: type[FakeStore]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreError, match=f"no Mooncake master answers at 127.0.0.1:{port} .*--rpc_port={port}"):
        mooncake.connect(f"127.0.0.1:{port}")
    assert fake_store.seen == ((), {})


def test_an_address_that_is_not_host_and_port_is_left_to_the_library(fake_store: type[FakeStore]) -> None:
    mooncake.connect("etcd://10.0.0.1:2379")
    assert fake_store.seen[0][-1] == "etcd://10.0.0.1:2379"


def test_a_failed_setup_names_code_and_address(fake_store: type[FakeStore], address: str) -> None:
    fake_store.code = -1
    with pytest.raises(StoreError, match=rf"{address} failed with -1 \(INTERNAL_ERROR, fault\)"):
        mooncake.connect(address)


def test_the_arguments_arrive_in_the_librarys_order(fake_store: type[FakeStore], address: str) -> None:
    mooncake.connect(address, segment_bytes=5, local_buffer_bytes=7, host="h", protocol="rdma", devices="d")
    assert fake_store.seen[0] == ("h", "P2PHANDSHAKE", 5, 7, "rdma", "d", address)


def test_the_environment_is_set_before_the_client_is_made(fake_store: type[FakeStore], address: str) -> None:
    mooncake.connect(address)
    environment = fake_store.seen[1]
    assert environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
    assert environment["GLOG_minloglevel"] == "1"


def test_what_the_user_has_set_stays(
    fake_store: type[FakeStore], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "12")
    mooncake.connect(address)
    assert fake_store.seen[1]["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "12"
