"""The only file that imports Mooncake: connects a client, and says once what the installed wheel can do.

The import happens inside functions, so that mooncrate works without Mooncake for whoever needs no store.
"""

import functools
import importlib
import os
import socket
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from mooncrate.errors import StoreError
from mooncrate.store import TCP_ADDRS_IN_FLIGHT, GuardedStore, Transport, describe

DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
"""The wheels that bring the same modules, for CUDA 12, for CUDA 13 and for machines without CUDA."""

INSTALL_HINT = (
    "run `pip install mooncake-transfer-engine-non-cuda` "
    "(with CUDA 12: mooncake-transfer-engine, with CUDA 13: mooncake-transfer-engine-cuda13)"
)
DEBIAN_PACKAGES = ("libibverbs1", "librdmacm1", "libnuma1")

QUEUE_VARIABLE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
ENVIRONMENT_DEFAULTS = {
    # Over TCP a batch with more addresses than the queue holds waits for 60 s, then nearly all its keys fail with -800.
    QUEUE_VARIABLE: "65535",
    # Warnings and worse. 0.3.13.post1 heeds the second alone; the first is glog's own, for builds that initialise it.
    "GLOG_minloglevel": "1",
    "MC_LOG_LEVEL": "WARNING",
}
"""Read by the library when a client is created. What the user has set stays."""


class _Queues:
    """The transport's queues of a process: all its clients send to a peer through the same."""


TCP_QUEUES = _Queues()

REACH_SECONDS = 3.0
DEFAULT_TENANT_ID = "default"


@dataclass(frozen=True)
class Capabilities:
    """What the installed wheel can do."""

    distribution: str
    """Name of the wheel, or ``unknown`` for a build of the user's own."""
    version: str
    backend: str
    """``MOONCAKE_STORE_BACKEND``: which of its two stores a newer wheel runs; empty when it was not chosen."""
    has_device_memory: bool
    """Whether it can move memory of a CUDA device; the non-CUDA wheel would dereference the pointer."""
    has_probe: bool
    """An existence check that takes no lease (``batch_probe_key``)."""
    has_group_ids: bool
    has_tenants: bool


@functools.cache
def capabilities() -> Capabilities:
    """Looks at the installed wheel, once per process.

    Raises:
        StoreError: Mooncake cannot be imported; the message says what to do.
    """
    module = _import_store()
    store_class = module.MooncakeDistributedStore
    distribution, version = _installed_wheel()
    return Capabilities(
        distribution=distribution,
        version=version,
        backend=os.environ.get("MOONCAKE_STORE_BACKEND", ""),
        has_device_memory=not distribution.endswith("-non-cuda"),
        has_probe=hasattr(store_class, "batch_probe_key"),
        has_group_ids=hasattr(getattr(module, "ReplicateConfig", None), "group_ids"),
        has_tenants="tenant_id" in (store_class.setup.__doc__ or ""),
    )


def connect(
    master_address: str,
    *,
    segment_bytes: int = 0,
    local_buffer_bytes: int = 16 << 20,
    host: str = "127.0.0.1",
    protocol: str = "tcp",
    devices: str = "",
    metadata_server: str = "P2PHANDSHAKE",
    tenant_id: str = DEFAULT_TENANT_ID,
) -> GuardedStore:
    """Connects a client to a master.

    The variables of `ENVIRONMENT_DEFAULTS` that are not set are set in this process's environment first.

    Args:
        master_address: ``host:port`` of the master, or the address of its high-availability backend.
        segment_bytes: Memory to contribute to the pool; it leaves the pool with this client. 0 contributes none.
        local_buffer_bytes: Memory for the client's own staging buffers.
        host: Name or address under which other clients reach this one.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, comma separated.
        metadata_server: ``P2PHANDSHAKE`` needs no server.
        tenant_id: Whose objects these are, for a master that keeps tenants apart.

    Returns:
        A store that is set up.

    Raises:
        StoreError: Mooncake cannot be imported, nothing listens at the master's address, the wheel knows no tenants but
            one was named, or set-up failed.
    """
    module = _import_store()
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Left out when it is the default one, because older wheels do not know the word.
    options = {} if tenant_id == DEFAULT_TENANT_ID else {"tenant_id": tenant_id}
    if options and not capabilities().has_tenants:
        raise StoreError(
            f"the installed Mooncake knows no tenants, so {tenant_id!r} cannot be kept apart: install a newer one"
        )
    _check_reachable(master_address)
    queue_owner = TCP_QUEUES if protocol == "tcp" else None
    store = GuardedStore(module.MooncakeDistributedStore(), transport=_transport(protocol), queue_owner=queue_owner)
    arguments = (host, metadata_server, segment_bytes, local_buffer_bytes, protocol, devices, master_address)
    code = store.setup(*arguments, **options)
    if code != 0:
        raise StoreError(
            f"setting up a Mooncake client over {protocol} for the master at {master_address} failed with "
            f"{describe(code)}: check the address, and that {segment_bytes + local_buffer_bytes} bytes of memory are "
            "free"
        )
    return store


def replicate_config(*, preferred_segment: str) -> object:
    """Returns what puts have to be told so that objects lie in one segment, as long as it has room.

    Args:
        preferred_segment: Name of the segment, which is the ``host:port`` of the client that gave it.

    Raises:
        StoreError: Mooncake cannot be imported.
    """
    config = _import_store().ReplicateConfig()
    config.preferred_segment = preferred_segment
    return config


def _transport(protocol: str) -> Transport:
    """Returns what a client takes that is made now: the environment is read then, and never again."""
    max_addrs_in_flight = None
    if protocol == "tcp":
        queued = os.environ.get(QUEUE_VARIABLE, "")
        # The variable counts one of the two queues; what a longer one adds beyond its own length was not measured.
        length = int(queued) if queued.isdecimal() else 1024
        max_addrs_in_flight = length if length >= TCP_ADDRS_IN_FLIGHT else min(length + 1024, TCP_ADDRS_IN_FLIGHT)
    return Transport(max_addrs_in_flight, has_device_memory=not _installed_wheel()[0].endswith("-non-cuda"))


def _import_store() -> ModuleType:
    """Returns ``mooncake.store``, an extension module without stubs, or raises a `StoreError` that says what to do."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if error.name in ("mooncake", "mooncake.store"):
            raise StoreError(f"Mooncake is not installed: {INSTALL_HINT}") from error
        raise StoreError(f"Mooncake's wheel misses the module {error.name}: run `pip install {error.name}`") from error
    except ImportError as error:
        raise StoreError(_describe_import_error(str(error))) from error


def _describe_import_error(message: str) -> str:
    library = message.split(":", 1)[0]
    if any(library.startswith(package.rstrip("1")) for package in DEBIAN_PACKAGES):
        command = f"apt-get install {' '.join(DEBIAN_PACKAGES)}"
        return f"Mooncake needs {library}, which this machine does not have: run `{command}`"
    if library.startswith(("libcu", "libnv")):
        return f"Mooncake's CUDA wheel needs {library}, which is not here: install the wheel that fits this machine"
    return f"Mooncake cannot be imported ({' '.join(message.split())}): {INSTALL_HINT}"


def _installed_wheel() -> tuple[str, str]:
    for name in DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown", "unknown"


def _check_reachable(master_address: str) -> None:
    """Refuses a dead address in milliseconds; the library would try it 20 times, for 90 s."""
    host, _, port = master_address.rpartition(":")
    if not host or not port.isdecimal() or "://" in host:
        return  # not host:port; only the library knows what it means
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"no Mooncake master answers at {master_address} ({error.strerror or error}): "
            f"start one with `mooncake_master --rpc_port={port}`, or correct the address"
        ) from error
