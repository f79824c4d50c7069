"""A ``mooncake_master`` of our own, on loopback, that ends with us.

For tests, demos and single machines; a cluster has masters of its own.
"""

import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mooncrate import leash
from mooncrate.errors import StoreError
from mooncrate.process_log import ProcessLog

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.02
NUM_PORT_TRIES = 3
TCP_LISTEN = "0A"
"""The state of a listening socket in ``/proc/net/tcp``."""


class MasterProcess:
    """Starts a master, and stops it.

    It runs in a session of its own, so Ctrl-C in a terminal does not reach it, and on a leash (`mooncrate.leash`), so
    that it ends even if this process is killed.

    >>> with MasterProcess() as master:  # doctest: +SKIP
    ...     store = connect(master.address)
    """

    def __init__(
        self,
        rpc_port: int | None = None,
        metrics_port: int | None = None,
        *,
        executable: str | None = None,
        options: Sequence[str] = (),
        start_timeout: float = 30.0,
        stop_timeout: float = 5.0,
    ) -> None:
        """Describes a master; `start`, or ``with``, starts it.

        Args:
            rpc_port: Port for clients; a free one if not given.
            metrics_port: Port of the HTTP server; a free one if not given.
            executable: Path of ``mooncake_master``; looked for beside the Python executable, then on PATH.
            options: Further options for it, as ``--name=value``.
            start_timeout: Seconds until it must answer.
            stop_timeout: Seconds from asking it to stop to killing it.
        """
        self._wanted_ports = (rpc_port, metrics_port)
        self._executable = executable
        self._options = tuple(options)
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._leash: subprocess.Popen[bytes] | None = None
        self._log: ProcessLog | None = None
        self.rpc_port = rpc_port or 0
        self.metrics_port = metrics_port or 0
        self.pid = 0

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{LOOPBACK}:{self.rpc_port}"

    def __enter__(self) -> Self:
        """Starts the master."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops the master."""
        self.stop()

    def start(self) -> None:
        """Starts the master and waits until it listens.

        Raises:
            StoreError: No executable, a port that is taken, or a master that died or did not listen in time; the
                message says what to do, or ends with what the master wrote last.
        """
        if self._leash is not None:
            raise StoreError(f"the master at {self.address} was started already")
        executable = self._executable or find_master()
        for port in self._wanted_ports:
            if port:
                _check_free(port)
        for tries_left in reversed(range(NUM_PORT_TRIES)):
            try:
                self._start_once(executable)
            except StoreError:
                # Between choosing a port and using it, somebody else may have taken it.
                lost_race = None in self._wanted_ports and not (_is_free(self.rpc_port) and _is_free(self.metrics_port))
                if not (lost_race and tries_left):
                    raise
            else:
                return

    def _start_once(self, executable: str) -> None:
        self.rpc_port, self.metrics_port = _choose_ports(*self._wanted_ports)
        self._log = ProcessLog()
        # An option that another version of the master does not know is passed over (gflags' undefok).
        command = [
            executable,
            f"--rpc_port={self.rpc_port}",
            f"--metrics_port={self.metrics_port}",
            f"--rpc_address={LOOPBACK}",
            f"--metrics_host={LOOPBACK}",
            "--minloglevel=1",  # its log of every 10 s would grow without end
            "--undefok=rpc_address,metrics_host,minloglevel",
            *self._options,
        ]
        self._leash = subprocess.Popen(
            [sys.executable, "-I", leash.__file__, str(self._stop_timeout), *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        self.pid = self._read_pid()
        # Connecting would not tell our master from a stranger on the same port; who owns the socket does.
        while not _is_listening(self.pid, self.rpc_port):
            if select.select([self], [], [], POLL_SECONDS)[0]:
                raise StoreError(self.describe_death())
            if time.monotonic() > deadline:
                raise StoreError(
                    f"mooncake_master did not listen on port {self.rpc_port} within {self._start_timeout:g} s"
                    f"{self._describe_log()}"
                )

    def _read_pid(self) -> int:
        line = os.read(self.fileno(), 64)
        if not line:
            raise StoreError(self.describe_death())
        return int(line)

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the master has ended, for `select`."""
        if self._leash is None or self._leash.stdout is None:
            raise StoreError("the master is not running: start it first")
        return self._leash.stdout.fileno()

    def is_alive(self) -> bool:
        """Tells whether the master was started and still runs."""
        return self._leash is not None and self._leash.poll() is None

    def describe_death(self) -> str:
        """Returns one line on how a master that is no longer alive ended, and what it wrote last."""
        if self._leash is None:
            return "mooncake_master is not running"
        code = self._leash.wait(self._stop_timeout)
        number = -code if code < 0 else code - 128  # of the leash itself, or of the master as the leash reports it
        is_signal = number in set(signal.Signals)
        how = f"was killed by {signal.Signals(number).name}" if is_signal else f"ended with exit code {code}"
        last_words = "" if number == signal.SIGKILL else self._describe_log()  # it had no time for any
        return f"mooncake_master on port {self.rpc_port} {how}{last_words}"

    def _describe_log(self) -> str:
        tail = self._log.tail() if self._log is not None else ""
        return f"; it wrote last: {tail}" if tail else ""

    def stop(self) -> None:
        """Stops the master: asks it, waits, kills it. Idempotent, and in order if it is dead already."""
        process, self._leash = self._leash, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # closing the first is what makes the leash stop the master
        try:
            process.wait(self._stop_timeout + 5.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None


def find_master() -> str:
    """Returns the path of ``mooncake_master``: of this environment first, then of PATH.

    Raises:
        StoreError: There is none.
    """
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mooncake_master")
    if found is None:
        raise StoreError(
            "mooncake_master was found neither beside the Python executable nor on PATH: install Mooncake with "
            "`pip install mooncake-transfer-engine-non-cuda`, or with the wheel for your CUDA version"
        )
    return found


def _choose_ports(rpc_port: int | None, metrics_port: int | None) -> tuple[int, int]:
    with contextlib.ExitStack() as stack:  # both are held while they are chosen, so that they differ
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for holder in held:
            holder.bind((LOOPBACK, 0))
        free = [int(holder.getsockname()[1]) for holder in held]
    return rpc_port or free[0], metrics_port or free[1]


def _check_free(port: int) -> None:
    try:
        _bind(port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"port {port} cannot be used ({reason}): stop what uses it, or choose another") from error


def _is_free(port: int) -> bool:
    try:
        _bind(port)
    except OSError:
        return False
    return True


def _bind(port: int) -> None:
    with socket.socket() as holder:
        # Without this, connections that ended a moment ago would make a free port look taken.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, port))


def _is_listening(pid: int, port: int) -> bool:
    """Tells whether a process has a listening TCP socket on a port, by ``/proc``."""
    sockets = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(descriptor.readlink()))
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return False
    for line in itertools.chain.from_iterable(tables):
        _, local_address, _, state, *_, inode = line.split()[:10]
        is_ours = f"socket:[{inode}]" in sockets
        if is_ours and state == TCP_LISTEN and int(local_address.rpartition(":")[2], 16) == port:
            return True
    return False
