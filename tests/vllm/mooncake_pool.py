"""A real Mooncake pool on this machine: a master, and the memory that the objects lie in.

The memory belongs to the client of this process and not to the engines', because what a client contributes leaves the
pool with it. Engines come and go; the objects stay until `MooncakePool.close`.

The client is Mooncake's own and not one of mooncrate's: what these tests look at must not depend on what they test.
"""

import importlib
import json
import os
import signal
from collections.abc import Iterable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from mooncrate.master import LOOPBACK, MasterProcess
from processes import wait_until

MEMORY_BYTES: Final = 256 << 20
BUFFER_BYTES: Final = 64 << 20
HTTP_SECONDS: Final = 10.0
FILLER: Final = "filler"
FILLER_BYTES: Final = 64 << 10
NO_ROOM: Final = -200


class MooncakePool:
    """A ``mooncake_master`` on free loopback ports and one client, both gone after `close`."""

    def __init__(self, directory: Path, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Start both.

        Args:
            directory: Takes the JSON file that connectors read, at ``config_path``.
            memory_bytes: Memory of the pool.

        Raises:
            mooncrate.errors.StoreError: The master did not come up.
            RuntimeError: The master would not have the client.
        """
        self._master = MasterProcess()
        self._master.start()
        try:
            self._client = _connect(self._master.address, memory_bytes)
        except BaseException:
            self._master.stop()
            raise
        self.config_path = directory / "mooncake.json"
        self.config_path.write_text(json.dumps(_connector_config(self._master.address)))

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool."""
        self.close()

    def keys(self) -> set[str]:
        """Return every key that the master knows."""
        path = "/get_all_keys"
        with closing(HTTPConnection(LOOPBACK, self._master.metrics_port, timeout=HTTP_SECONDS)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"the master answered {response.status} to {path}: {body}")
        return set(body.split())

    def objects(self) -> dict[str, bytes]:
        """Return every object by its key."""
        return {key: self._client.get(key) for key in self.keys()}

    def clear(self) -> None:
        """Remove every object, leased ones too."""
        if (code := self._client.remove_all(True)) < 0:
            raise RuntimeError(f"remove_all answered {code}")

    def put(self, key: str, value: bytes) -> None:
        """Put bytes under a key that is not there."""
        if (code := self._client.put(key, value)) != 0:
            raise RuntimeError(f"put answered {code} for {key}")

    def replace(self, key: str, value: bytes) -> None:
        """Put other bytes under a key that is there, where a plain put would answer 0 and keep the old ones."""
        if (code := self._client.remove(key, True)) != 0:
            raise RuntimeError(f"remove answered {code} for {key}")
        self.put(key, value)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects, leased ones too."""
        for key in keys:
            if (code := self._client.remove(key, True)) != 0:
                raise RuntimeError(f"remove answered {code} for {key}")

    def fill(self) -> None:
        """Put objects that are never evicted until no other fits; `clear` removes them."""
        config = importlib.import_module("mooncake.store").ReplicateConfig()
        config.with_hard_pin = True
        value = bytes(FILLER_BYTES)
        number = 0
        while (code := self._client.put(f"{FILLER}/{number}", value, config)) == 0:
            number += 1
        if code != NO_ROOM:
            raise RuntimeError(f"put answered {code} after {number} fillers")

    def kill_master(self) -> None:
        """End the master as a crash would; the memory stays, but nobody knows what is in it."""
        os.kill(self._master.pid, signal.SIGKILL)
        self._master.stop()

    def restart_master(self) -> None:
        """Start a master on the ports of the old one, and return when the pool has its memory again."""
        self._master = MasterProcess(self._master.rpc_port, self._master.metrics_port)
        self._master.start()
        wait_until(lambda: self._client.put(FILLER, b".") == 0, "a put through the new master")
        self.clear()

    def close(self) -> None:
        """Close the client, then stop the master, whatever state they are in."""
        try:
            client, self._client = self._client, None
            if client is not None:
                client.close()
        finally:
            self._master.stop()


def _connect(address: str, memory_bytes: int) -> Any:  # noqa: ANN401 - the wheel has no types
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # read when the library is loaded
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = client.setup(LOOPBACK, "P2PHANDSHAKE", memory_bytes, BUFFER_BYTES, "tcp", "", address)
    if code != 0:
        raise RuntimeError(f"the client's setup answered {code}")
    return client


def _connector_config(address: str) -> dict[str, object]:
    return {
        "mode": "standalone-store",  # engines contribute no memory: it would leave with them
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": address,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": BUFFER_BYTES,
    }
