"""What the set-up says while it works, and how it runs commands."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# Each would make a command work on another environment than the one it was started for.
FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")


class SetupError(Exception):
    """The set-up cannot go on; the message is one line that says what to do."""


@contextmanager
def step(title: str) -> Iterator[None]:
    """Says what is being done, and afterwards how long it took."""
    print(f"==> {title}", flush=True)
    start = time.monotonic()
    yield
    print(f"    done in {time.monotonic() - start:.1f} s", flush=True)


def run(command: Sequence[str | Path], *, cwd: Path, variables: Mapping[str, str] | None = None) -> None:
    """Runs a command that talks to the terminal itself.

    Args:
        command: The program and its arguments.
        cwd: Where it runs.
        variables: Environment variables on top of this process's.

    Raises:
        SetupError: It did not start, or failed.
    """
    _completed(command, cwd=cwd, variables=variables or {}, stdout=None)


def output_of(command: Sequence[str | Path], *, cwd: Path) -> str:
    """Returns what a command prints; raises `SetupError` as `run` does."""
    return _completed(command, cwd=cwd, variables={}, stdout=subprocess.PIPE).stdout


def _completed(
    command: Sequence[str | Path], *, cwd: Path, variables: Mapping[str, str], stdout: int | None
) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    text = shlex.join(map(str, command))
    try:
        # Standard input is closed: a question that nobody answers would hang CI.
        completed = subprocess.run(
            list(command),
            cwd=cwd,
            env={**own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SetupError(f"cannot run `{text}`: {error}") from error
    if completed.returncode:
        sys.stdout.flush()
        raise SetupError(f"`{text}` failed with exit status {completed.returncode}; its output above says why")
    return completed
