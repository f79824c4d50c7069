"""The life of a master: started, seen to die, and stopped, whatever happens to whoever started it."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncrate import leash
from mooncrate.errors import StoreError
from mooncrate.master import MasterProcess, find_master
from processes import is_running, wait_until

WAIT_SECONDS = 30.0
Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a shell script that stands in for the master, and returns its path."""

    def write(body: str) -> str:
        path = tmp_path / "mooncake_master"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def _wait_for_death(master: MasterProcess) -> None:
    assert select.select([master], [], [], WAIT_SECONDS)[0]
    wait_until(lambda: not master.is_alive(), "the death of the master", WAIT_SECONDS)


def test_it_listens_on_loopback_alone_and_stops() -> None:
    master = MasterProcess()
    assert not master.is_alive()
    with master:
        assert master.is_alive()
        assert is_running(master.pid)
        assert master.address == f"127.0.0.1:{master.rpc_port}"
        for port in (master.rpc_port, master.metrics_port):
            socket.create_connection(("127.0.0.1", port), WAIT_SECONDS).close()
            with pytest.raises(ConnectionRefusedError):  # another address of the same interface
                socket.create_connection(("127.0.0.2", port), WAIT_SECONDS)
        with pytest.raises(StoreError, match="was started already"):
            master.start()
    assert not master.is_alive()
    assert not is_running(master.pid)
    master.stop()
    with pytest.raises(StoreError, match="not running"):
        master.fileno()


def test_it_can_be_started_again_on_the_same_port(master: MasterProcess) -> None:
    first = MasterProcess()
    with first:
        pass
    assert first.rpc_port != master.rpc_port
    with MasterProcess(first.rpc_port, first.metrics_port) as second:
        assert (second.rpc_port, second.metrics_port) == (first.rpc_port, first.metrics_port)


def test_a_port_that_is_taken_is_one_clear_line(master: MasterProcess) -> None:
    for taken in (MasterProcess(master.rpc_port), MasterProcess(None, master.metrics_port)):
        with pytest.raises(StoreError, match=r"port \d+ cannot be used \(Address already in use\)") as caught, taken:
            pass
        assert "\n" not in str(caught.value)


def test_a_port_that_does_not_exist_is_one_clear_line() -> None:
    with pytest.raises(StoreError, match="port 70000 cannot be used"):
        MasterProcess(70000).start()


def test_a_listener_of_somebody_else_is_not_taken_for_ours(script: Script) -> None:
    """A master that lost its port to another process lives on for a second; connecting would reach the other."""
    master = MasterProcess(executable=script("exec tail -f /dev/null"), start_timeout=0.5)
    with pytest.raises(StoreError, match="did not listen on port"), _StealsPort(master):
        master.start()


class _StealsPort:
    """Listens on whatever port a master chooses, as soon as it has chosen."""

    def __init__(self, master: MasterProcess) -> None:
        self._thread = threading.Thread(target=self._steal, args=(master,))
        self._is_over = threading.Event()

    def _steal(self, master: MasterProcess) -> None:
        wait_until(lambda: bool(master.rpc_port), "a port")
        with socket.create_server(("127.0.0.1", master.rpc_port)):
            self._is_over.wait(WAIT_SECONDS)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exception: object) -> None:
        self._is_over.set()
        self._thread.join()


def test_without_an_executable_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match="pip install mooncake-transfer-engine-non-cuda"):
        MasterProcess().start()


def test_the_executable_of_this_environment_goes_before_path(
    monkeypatch: pytest.MonkeyPatch, script: Script, tmp_path: Path
) -> None:
    on_path = script("exit 0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_master() == str(Path(sys.executable).with_name("mooncake_master"))
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert find_master() == on_path


def test_an_early_death_is_told_with_the_last_words(script: Script) -> None:
    master = MasterProcess(executable=script("echo first; echo boom >&2; exit 3"))
    with pytest.raises(StoreError, match=r"on port \d+ ended with exit code 3; it wrote last: first \| boom$"):
        master.start()
    assert not master.is_alive()


def test_a_program_that_cannot_be_run_is_an_early_death(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"ended with exit code 1; it wrote last: .*FileNotFoundError"):
        MasterProcess(executable=str(tmp_path / "nothing")).start()


def test_a_master_that_does_not_listen_in_time_is_stopped(script: Script) -> None:
    master = MasterProcess(executable=script("echo waiting; exec tail -f /dev/null"), start_timeout=0.3)
    with pytest.raises(StoreError, match=r"did not listen on port .* within 0.3 s; it wrote last: waiting"):
        master.start()
    assert not is_running(master.pid)


def test_a_master_that_ignores_the_request_to_stop_is_killed(script: Script) -> None:
    # Python listens in its place, because the shell cannot.
    program = (
        "import signal, socket, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "port = int(next(a for a in sys.argv if a.startswith('--rpc_port')).partition('=')[2]); "
        "server = socket.create_server(('127.0.0.1', port)); signal.pause()"
    )
    stubborn = script(f'exec "{sys.executable}" -c "{program}" "$@"')
    with MasterProcess(executable=stubborn, stop_timeout=0.2) as master:
        assert is_running(master.pid)
    assert not is_running(master.pid)


def test_a_killed_master_is_noticed_and_can_still_be_stopped() -> None:
    with MasterProcess() as master:
        os.kill(master.pid, signal.SIGKILL)
        _wait_for_death(master)
        assert master.describe_death() == f"mooncake_master on port {master.rpc_port} was killed by SIGKILL"
    master.stop()


def test_it_outlives_the_thread_that_started_it() -> None:
    master = MasterProcess()
    thread = threading.Thread(target=master.start)
    thread.start()
    thread.join()
    try:
        assert master.is_alive()
        socket.create_connection(("127.0.0.1", master.rpc_port), WAIT_SECONDS).close()
    finally:
        master.stop()


def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    program = (
        "from mooncrate.master import MasterProcess\nm = MasterProcess()\nm.start()\nprint(m.pid, flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_until(lambda: not is_running(pid), "the end of the master")


def test_it_does_not_outlive_its_leash() -> None:
    with MasterProcess() as master:
        parent = int(Path(f"/proc/{master.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        os.kill(parent, signal.SIGKILL)
        _wait_for_death(master)
        wait_until(lambda: not is_running(master.pid), "the end of the master")
        assert "was killed by SIGKILL" in master.describe_death()


def test_a_parent_that_dies_before_it_is_told_anything_leaves_nothing() -> None:
    command = [sys.executable, "-I", leash.__file__, "1.0", "sleep", "301"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdout.close()
        started.stdin.close()
        assert started.wait(timeout=20) == 128 + signal.SIGTERM
