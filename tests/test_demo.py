"""The demo as a user runs it: a process, its exit code, what it prints, and what it leaves behind."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncrate.demo.workload import PERIOD, Workload
from processes import is_running, wait_until

TIMEOUT_SECONDS = 240.0
SMALL = ("--tokens=200", "--layers=3", "--heads=2", "--head-dim=64")
NUM_PROCESSES = 3
"""Master, engine A, engine B: each announced with its process id."""


def _run(*options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncrate.demo", *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, **(environment or {})},
        check=False,
    )


@contextmanager
def _started(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Runs the demo up to the point where all its processes run, and gives their ids."""
    command = [sys.executable, "-m", "mooncrate.demo", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            pids: list[int] = []
            while len(pids) < NUM_PROCESSES:
                line = demo.stdout.readline()
                assert line, demo.stderr and demo.stderr.read()
                pids += [int(pid) for pid in re.findall(r"process (\d+)", line)]
            yield demo, pids
        finally:
            demo.kill()


def _only_line(text: str) -> str:
    assert text.startswith("mooncrate.demo: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text


def test_it_saves_finds_loads_and_verifies() -> None:
    finished = _run(*SMALL)
    assert finished.returncode == 0, finished.stderr
    rows = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", finished.stdout, re.MULTILINE))
    workload = Workload(num_tokens=200, num_layers=3, num_heads=2, head_dim=64)
    assert rows["tokens"] == "192"  # whole blocks
    assert rows["chunks"] == rows["keys found"] == "12"
    assert rows["addresses"] == "36"
    assert rows["bytes"] == f"{workload.num_bytes:,}" == "294,912"
    assert "GB/s" in rows["save"]
    assert "GB/s" in rows["load"]
    assert rows["verified"] == "every byte"
    assert finished.stderr == ""
    pids = [int(pid) for pid in re.findall(r"process (\d+)", finished.stdout)]
    assert len(pids) == NUM_PROCESSES
    assert not any(is_running(pid) for pid in pids)


def test_more_addresses_than_tcp_takes_in_one_call_still_go_through() -> None:
    finished = _run("--tokens=1040", "--layers=32", "--heads=1", "--head-dim=8")
    assert finished.returncode == 0, finished.stderr
    assert "2,080" in finished.stdout


def test_one_wrong_byte_is_found_and_named() -> None:
    finished = _run(*SMALL, "--tamper")
    assert finished.returncode == 1
    workload = Workload(num_tokens=200, num_layers=3, num_heads=2, head_dim=64)
    expected = _pattern(workload, chunk=6, layer=1)[4096]
    assert (
        f"wrong byte in chunk 6, layer 1, offset 4096 (block {workload.block_ids('B')[6]}): "
        f"expected {expected}, got {expected ^ 0xFF}; 1 wrong"
    ) in _only_line(finished.stderr)
    assert "verified" not in finished.stdout


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finished = _run(*SMALL, f"--port={port}")
    assert finished.returncode == 1
    assert f"port {port} cannot be used (Address already in use): stop what uses it" in _only_line(finished.stderr)


def test_mooncake_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    finished = _run(*SMALL, environment={"PYTHONPATH": path})
    assert finished.returncode == 1
    assert "run `apt-get install libibverbs1 librdmacm1 libnuma1`" in _only_line(finished.stderr)
    assert finished.stdout == ""


def test_a_device_that_is_not_there_is_one_line() -> None:
    finished = _run(*SMALL, "--device=cuda:99")
    assert finished.returncode == 1
    assert re.search("CUDA|device", _only_line(finished.stderr))


def test_a_step_that_takes_too_long_is_one_line() -> None:
    finished = _run(*SMALL, "--timeout=0")
    assert finished.returncode == 1
    assert "engine A and B did not answer 'ready' within 0 s" in _only_line(finished.stderr)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, r"mooncake_master on port \d+ was killed by SIGKILL.*: start the demo again"),
        (1, "engine A was killed: look for memory running out"),
        (2, "engine B was killed: look for memory running out"),
    ],
    ids=["master", "engine A", "engine B"],
)
def test_a_process_that_is_killed_ends_the_demo_with_one_line(index: int, message: str) -> None:
    with _started(*SMALL) as (demo, pids):
        os.kill(pids[index], signal.SIGKILL)
        _, errors = demo.communicate(timeout=TIMEOUT_SECONDS)
    assert demo.returncode == 1
    assert re.search(message, _only_line(errors))
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(number: signal.Signals) -> None:
    with _started(*SMALL) as (demo, pids):
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=TIMEOUT_SECONDS)
    assert demo.returncode == 128 + number
    assert f"interrupted by {number.name}, everything is stopped" in _only_line(errors)
    assert not any(is_running(pid) for pid in pids)


def test_nothing_outlives_a_demo_that_is_killed() -> None:
    with _started(*SMALL) as (demo, pids):
        demo.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of master and engines")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens=15"], "15 tokens do not fill one block of 16"),
        (["--layers=0"], "0 is not positive"),
        (["--tokens=16777216", "--block-size=1"], "more than there are different patterns"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    finished = _run(*options)
    assert finished.returncode == 2
    assert message in finished.stderr


def _pattern(workload: Workload, chunk: int, layer: int) -> bytes:
    """The naive twin of `PagedKVCache`'s patterns."""
    a, b, c = workload.coefficients(chunk, layer)
    return bytes((a * i * i + b * i + c) % PERIOD for i in range(workload.block_bytes))


def test_no_two_blocks_look_alike_nor_like_themselves_shifted() -> None:
    workload = Workload(num_tokens=4096, num_layers=4, num_heads=1, head_dim=4)
    patterns = [_pattern(workload, chunk, layer) for chunk in range(256) for layer in range(4)]
    assert len(set(patterns)) == len(patterns) == 1024
    for pattern in patterns:
        assert len({pattern[shift:] + pattern[:shift] for shift in range(PERIOD)}) == PERIOD


def test_the_engines_use_other_blocks_for_the_same_prompt() -> None:
    workload = Workload()
    blocks_a, blocks_b = workload.block_ids("A"), workload.block_ids("B")
    assert len(set(blocks_a)) == len(set(blocks_b)) == workload.num_chunks == 256
    assert max(blocks_a + blocks_b) < workload.num_blocks
    assert sum(a == b for a, b in zip(blocks_a, blocks_b, strict=True)) < 16
    assert len(set(workload.block_hashes())) == 256
