"""Which store to use: read from the JSON that vLLM's Mooncake deployments have, or made here for a single machine.

Rationale: names, defaults and meanings are those of vLLM 0.32's Mooncake store connector, so that a file that works
there works here, unchanged. What is stricter is what went wrong silently: a misspelt name, ``"false"`` taken for true,
a size that wraps.
"""

import difflib
import json
import logging
import os
import socket
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from mooncrate import mooncake
from mooncrate.errors import ConfigError
from mooncrate.master import LOOPBACK, MasterProcess
from mooncrate.mooncake import DEFAULT_TENANT_ID
from mooncrate.sizes import parse_size, show
from mooncrate.store import CLOSE_TIMEOUT_SECONDS, GuardedStore

logger = logging.getLogger(__name__)

CONFIG_PATH_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
HOST_VARIABLE: Final = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
LOOKUP_BUFFER_BYTES: Final = 16 << 20
"""Staging memory of a client that only looks up: Mooncake's own default."""

IGNORED_FIELDS: Final = {
    # vLLM takes the machine's own address instead. One file often serves several machines, so it cannot be right here.
    "local_hostname": "the address of this machine is found out, or taken from MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    "enable_ssd_offload": "it is for Mooncake's store service",
    "ssd_offload_path": "it is for Mooncake's store service",
    "enable_client_http_server": "it is for Mooncake's store service",
    "client_http_port": "it is for Mooncake's store service",
    "device_name_per_gpu": "it is for versions of vLLM after 0.32",
    "use_ascend_direct": "it is for Ascend devices",
    "alloc_in_same_node": "it is for Ascend devices",
    "metadata_backend": "it is for transfers between two engines",
    "prefill_url": "it is for transfers between two engines",
    "decode_url": "it is for transfers between two engines",
}
"""Names that files of existing deployments carry for other readers, or that vLLM passes over, and why."""

_Text = Annotated[str, StringConstraints(strict=True, strip_whitespace=True)]
_FilledText = Annotated[_Text, StringConstraints(min_length=1)]
_Size = Annotated[int, BeforeValidator(parse_size)]
_Tenant = Annotated[
    _Text,
    BeforeValidator(lambda value: DEFAULT_TENANT_ID if value is None else value),
    AfterValidator(lambda text: text or DEFAULT_TENANT_ID),
]


class StoreConfig(BaseModel):
    """Where the pool is, and what this process gives to it. Immutable, hashable, and can be pickled.

    Sizes may be given as text (`parse_size`); as attributes they are bytes.

    >>> config = StoreConfig.from_mapping({"master_server_address": "10.0.0.1:50051", "global_segment_size": "80GB"})
    >>> config.global_segment_size, config.protocol, config.owns_master
    (85899345920, 'rdma', False)
    >>> StoreConfig.from_mapping({"master_server_addres": "10.0.0.1:50051"})
    Traceback (most recent call last):
    mooncrate.errors.ConfigError: mapping: master_server_address: missing; mapping: master_server_addres: \
unknown name, did you mean 'master_server_address'?
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    master_server_address: _FilledText
    """``host:port`` of the master, or the address of its high-availability backend."""
    metadata_server: _FilledText = "P2PHANDSHAKE"
    """``P2PHANDSHAKE`` needs no server."""
    protocol: Annotated[_FilledText, StringConstraints(to_lower=True)] = "rdma"
    """``rdma``, ``tcp``, or another transport that the installed wheel knows."""
    device_name: _Text = ""
    """RDMA devices, comma separated; empty lets Mooncake choose."""
    mode: Literal["embedded", "standalone-store"] = "embedded"
    """vLLM's word for who gives the memory: each rank (``embedded``), or another process (``standalone-store``).

    It has nothing to do with `StoreConfig.embedded`, which also brings the master.
    """
    global_segment_size: _Size = 4 << 30
    """Bytes that each process contributes to the pool; 0 exactly in mode ``standalone-store``."""
    local_buffer_size: _Size = 4 << 30
    """Bytes of each client's own staging buffer."""
    enable_offload: bool = False
    """The owner of the memory keeps objects on SSD as well: loads have to fit its staging buffer."""
    tenant_id: _Tenant = DEFAULT_TENANT_ID

    _owns_master: bool = PrivateAttr(default=False)

    def __init__(self, source: str = "StoreConfig", /, **values: Any) -> None:  # noqa: ANN401 - checked by the model
        """Checks all values.

        Args:
            source: Where the values come from, for messages.
            **values: The fields.

        Raises:
            ConfigError: Some cannot be meant; each is named.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise ConfigError("; ".join(f"{source}: {_describe(detail)}" for detail in details)) from None

    @property
    def owns_master(self) -> bool:
        """Whether `connect` starts a master."""
        return self._owns_master

    @classmethod
    def embedded(cls, *, global_segment_size: int | str = "1GiB", local_buffer_size: int | str = "64MiB") -> Self:
        """A pool for this process alone: a master on a free loopback port, and memory of this process.

        Both end with the connection: nothing of it is left.

        Args:
            global_segment_size: Size of the pool. Mooncake takes memory in multiples of 16 MiB.
            local_buffer_size: Size of the client's staging buffer.

        Raises:
            ConfigError: A size cannot be meant.
        """
        config = cls(
            "StoreConfig.embedded()",
            master_server_address=f"{LOOPBACK}:0",  # any free port, as for bind()
            protocol="tcp",
            global_segment_size=global_segment_size,
            local_buffer_size=local_buffer_size,
        )
        config._owns_master = True
        return config

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], *, source: str = "mapping") -> Self:
        """Reads settings under the names that they have in the file.

        Args:
            values: The fields; `IGNORED_FIELDS` are passed over.
            source: Where they come from, for messages.

        Raises:
            ConfigError: A value cannot be meant, a name is unknown, or the master's address is missing.
        """
        wanted: dict[str, object] = {}
        for name, value in values.items():
            if not isinstance(name, str):
                raise ConfigError(f"{source}: {name!r}: names are strings")
            if name in IGNORED_FIELDS:
                logger.info("%s: %s is not used: %s", source, name, IGNORED_FIELDS[name])
            elif not (name == "enable_offload" and value is None):  # for vLLM null is false
                wanted[name] = value
        return cls(source, **wanted)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a JSON file.

        Raises:
            ConfigError: It cannot be read, is no JSON object, or `from_mapping` refuses what it says.
        """
        return cls._from_file(Path(path), os.fspath(path))

    @classmethod
    def from_env(cls) -> Self:
        """Reads the JSON file that ``MOONCAKE_CONFIG_PATH`` names.

        Raises:
            ConfigError: The variable is not set, or `from_file` refuses the file.
        """
        path = os.environ.get(CONFIG_PATH_VARIABLE)
        if not path:
            raise ConfigError(f"{CONFIG_PATH_VARIABLE} is not set: it names the JSON file that describes the store")
        return cls._from_file(Path(path), f"{path} ({CONFIG_PATH_VARIABLE})")

    @classmethod
    def _from_file(cls, path: Path, source: str) -> Self:
        try:
            # Decimal, because a size written as 1.1e12 should not depend on the nearest float.
            values = json.loads(path.read_text("utf-8-sig"), parse_float=Decimal)
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: not a JSON object, but a {type(values).__name__}: {show(values)}")
        return cls.from_mapping(values, source=source)

    @field_validator("global_segment_size")
    @classmethod
    def _fits_mode(cls, size: int, info: ValidationInfo) -> int:
        mode = info.data.get("mode")  # absent if it was wrong itself
        if mode == "embedded" and size == 0:
            raise ValueError("mode 'embedded' contributes memory: give a size, or use mode 'standalone-store'")
        if mode == "standalone-store" and size != 0:
            raise ValueError("mode 'standalone-store' contributes no memory: write 0, or use mode 'embedded'")
        return size

    @field_validator("local_buffer_size")
    @classmethod
    def _is_a_buffer(cls, size: int) -> int:
        if size == 0:
            raise ValueError("a client needs a staging buffer")
        return size

    def connect(self, *, contributes_memory: bool = True, host: str | None = None) -> "StoreConnection":
        """Connects a client, and starts the master first if it is ours.

        Args:
            contributes_memory: False for a client that only looks up: it gives no memory and needs little itself.
            host: Name or address under which other clients reach this one. If not given: what
                ``MOONCAKE_REQUESTER_LOCAL_HOSTNAME`` says, else the address from which this machine reaches the master.

        Raises:
            StoreError: Mooncake is not installed, the master does not answer, or set-up failed.
            ConfigError: This machine's own address cannot be found out.
        """
        master = MasterProcess() if self.owns_master else None
        try:
            if master is not None:
                master.start()
            address = self.master_server_address if master is None else master.address
            store = mooncake.connect(
                address,
                segment_bytes=self.global_segment_size if contributes_memory else 0,
                local_buffer_bytes=self.local_buffer_size
                if contributes_memory
                else min(self.local_buffer_size, LOOKUP_BUFFER_BYTES),
                host=host or find_host(address),
                protocol=self.protocol,
                devices=self.device_name,
                metadata_server=self.metadata_server,
                tenant_id=self.tenant_id,
            )
        except BaseException:
            if master is not None:
                master.stop()
            raise
        return StoreConnection(store, master)


class StoreConnection:
    """A store that is set up, and the master that was started for it, if one was.

    >>> with StoreConfig.embedded().connect() as store:  # doctest: +SKIP
    ...     store.batch_is_exist(["key"])
    [0]
    """

    def __init__(self, store: GuardedStore, master: MasterProcess | None = None) -> None:
        """Takes over both: closing the connection ends them."""
        self.store: Final = store
        self.master: Final = master

    def __enter__(self) -> GuardedStore:
        """Returns the store."""
        return self.store

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connection."""
        self.close()

    def close(self, timeout: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """Closes the store, then stops our own master, also when calls on the store still run. Idempotent.

        Args:
            timeout: Seconds to wait for calls in flight.

        Raises:
            StoreError: The timeout ended first; `close` may be tried again.
        """
        try:
            self.store.close(timeout)
        finally:
            if self.master is not None:
                self.master.stop()


def find_host(master_address: str) -> str:
    """Returns what other clients should call this machine.

    ``MOONCAKE_REQUESTER_LOCAL_HOSTNAME`` where set, as in vLLM. Else the address from which packets to the master would
    leave: on loopback for a master on loopback, and of the right network on a machine with several.

    Raises:
        ConfigError: There is no route to the master.
    """
    if named := os.environ.get(HOST_VARIABLE, "").strip():
        return named
    # The first address of a list, without the scheme of a high-availability backend.
    first = master_address.rpartition("://")[2].replace(";", ",").partition(",")[0].partition("/")[0]
    host, _, port = first.rpartition(":") if first.rpartition(":")[2].isdecimal() else (first, "", "1")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the address of this machine cannot be found out: no route to the master at {master_address} "
            f"({getattr(error, 'strerror', None) or error}): set {HOST_VARIABLE}"
        ) from error


def _describe(detail: ErrorDetails) -> str:
    """Returns field, value and what is wrong with it, for one finding of pydantic."""
    name = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"{name}: missing"
    if detail["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(name.lower(), [*StoreConfig.model_fields, *IGNORED_FIELDS], n=1)
        hint = f", did you mean '{nearest[0]}'?" if nearest else f"; known: {', '.join(StoreConfig.model_fields)}"
        return f"{name}: unknown name{hint}"
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # names the value already
        return f"{name}: {cause}"
    message = str(cause or detail["msg"])
    return f"{name}: {show(detail['input'])}: {message[:1].lower()}{message[1:]}"
