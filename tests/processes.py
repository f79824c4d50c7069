"""Looks at processes from outside: whether they still run, and waiting until they do not."""

import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.02


def is_running(pid: int) -> bool:
    """Tells whether a process runs; one that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Polls until a condition on another process holds.

    Raises:
        TimeoutError: It did not within the timeout.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout:g} s")
        time.sleep(POLL_SECONDS)
