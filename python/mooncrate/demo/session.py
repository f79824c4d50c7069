"""The demo's processes: starts the engines, tells them what to do, and stops them, come what may."""

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from mooncrate.demo.settings import Settings
from mooncrate.errors import StoreError
from mooncrate.master import MasterProcess
from mooncrate.process_log import ProcessLog

STOP_SECONDS: Final = 20.0
BLAME_SECONDS: Final = 0.5
"""How long the death of a master may take to show once its clients have failed."""


class EngineProcess:
    """One engine, seen from the demo.

    It runs in a session of its own, so that Ctrl-C reaches the demo alone, which then stops it.
    """

    def __init__(self, settings: Settings) -> None:
        """Starts the process."""
        self.name: Final = settings.name
        self._log = ProcessLog()
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncrate.demo.engine", settings.to_json()],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable with an answer, or when the process has ended."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe, by the constructor
        return self._process.stdout.fileno()

    def send(self, command: str) -> None:
        """Sends a command; to a process that has ended it goes nowhere, and `read` will tell."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe, by the constructor
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{command}\n".encode())

    def read(self) -> list[dict[str, Any]]:
        """Returns the answers that have come.

        Raises:
            StoreError: The engine failed, and says why, or its process has ended.
        """
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            raise StoreError(self._describe_death())
        *lines, self._unread = (self._unread + data).split(b"\n")
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if answer["event"] == "failed":
                raise StoreError(f"engine {self.name}: {answer['message']}")
        return answers

    def wait(self, timeout: float) -> None:
        """Waits for the process to end, and kills it if it does not."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the process if it still runs. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def _describe_death(self) -> str:
        code = self._process.wait(STOP_SECONDS)
        if code == -signal.SIGKILL:
            return f"engine {self.name} was killed: look for memory running out, or use fewer --tokens"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self._log.tail()
        return f"engine {self.name} {how}" + (f"; it wrote last: {tail}" if tail else "")


class Session:
    """A master and the engines that use it; leaving it stops the engines."""

    def __init__(self, master: MasterProcess, timeout: float) -> None:
        """Begins without engines.

        Args:
            master: A master that runs.
            timeout: Seconds that any one step may take.
        """
        self._master = master
        self._timeout = timeout
        self._engines: list[EngineProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(master, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        """Returns the session."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets the engines close their clients if all went well, and kills them if not."""
        try:
            if kind is None:
                for engine in self._engines:
                    engine.send("stop")
                deadline = time.monotonic() + STOP_SECONDS
                for engine in self._engines:
                    engine.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._selector.close()
            for engine in self._engines:
                engine.kill()

    def start(self, settings: Settings) -> EngineProcess:
        """Starts an engine; `wait_for` tells when it is ready."""
        engine = EngineProcess(settings)
        self._engines.append(engine)
        self._selector.register(engine, selectors.EVENT_READ)
        return engine

    def wait_for(self, event: str, engines: Sequence[EngineProcess]) -> list[dict[str, Any]]:
        """Waits until each of these engines has answered with an event; returns the answers in the same order.

        Raises:
            StoreError: The master or any engine died, an engine failed, or time is up.
        """
        deadline = time.monotonic() + self._timeout
        answers: dict[str, dict[str, Any]] = {}
        while missing := [engine.name for engine in engines if engine.name not in answers]:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StoreError(
                    f"engine {' and '.join(missing)} did not answer '{event}' within {self._timeout:g} s: "
                    "give it more time with --timeout, or less to do with --tokens"
                )
            for key, _ in ready:
                engine = key.fileobj
                if not isinstance(engine, EngineProcess):
                    raise StoreError(self._describe_master_death())
                for answer in self._read(engine):
                    if answer["event"] == event:
                        answers[engine.name] = answer
        return [answers[engine.name] for engine in engines]

    def _read(self, engine: EngineProcess) -> list[dict[str, Any]]:
        """Reads an engine's answers; whatever goes wrong there is the master's fault if that is dead."""
        try:
            return engine.read()
        except StoreError as error:
            if select.select([self._master], [], [], BLAME_SECONDS)[0]:
                raise StoreError(self._describe_master_death()) from error
            raise

    def _describe_master_death(self) -> str:
        return f"{self._master.describe_death()}; the pool went with it: start the demo again"
