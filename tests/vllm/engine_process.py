"""The parent's side of `engine_run`: starts one engine process, sends it commands, and always ends it."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine_settings import EngineSettings

PROGRAM: Final = Path(__file__).with_name("engine_run.py")
BOOT_SECONDS: Final = 400.0
ANSWER_SECONDS: Final = 60.0
EXIT_SECONDS: Final = 30.0
ALL_LOG_PROBS: Final = -1


@dataclass(frozen=True)
class Generation:
    """What an engine answered to one prompt."""

    num_cached_tokens: int
    finish_reason: str
    token_ids: list[int]
    log_probs: list[list[float]]  # by token id, per generated token
    prompt_log_probs: list[float]  # of each prompt token but the first; empty unless asked for


@dataclass(frozen=True)
class State:
    """What an engine holds when it has nothing to do."""

    num_requests: int
    num_blocks: int
    num_free_blocks: int
    num_references: int
    has_jobs: bool
    leftovers: dict[str, int]  # what our connector itself counts; empty for others
    counters: dict[str, float]


class EngineProcess:
    """One engine in a subprocess. It boots in the background: `wait_until_ready` before the first command."""

    def __init__(
        self, name: str, model: Path, log_dir: Path, settings: EngineSettings, *, config_path: Path | None = None
    ) -> None:
        """Start the process.

        Args:
            name: For error messages and the log's file name.
            model: Directory of the checkpoint.
            log_dir: Takes the engine's log.
            settings: Sizes and connector.
            config_path: JSON file that describes the pool; an engine without a connector does not hear of it.
        """
        self.name = name
        self._log_path = log_dir / f"{name}.log"
        # Its own, and short: the lookup server of vLLM's connector is a socket in it, and a socket's path has a length
        # limit.
        self._socket_dir = tempfile.TemporaryDirectory(prefix="engine-")
        answers_fd, engine_answers_fd = os.pipe()
        self._reached_fd, engine_reached_fd = os.pipe()
        engine_opened_fd, self._opened_fd = os.pipe()
        self._answers = os.fdopen(answers_fd, "rb", buffering=0)
        self._unread = b""
        engine_fds = (engine_answers_fd, engine_reached_fd, engine_opened_fd)
        command = [
            sys.executable,
            str(PROGRAM),
            f"--model={model}",
            f"--settings={settings.to_json()}",
            f"--answers-fd={engine_answers_fd}",
            f"--reached-fd={engine_reached_fd}",
            f"--opened-fd={engine_opened_fd}",
        ]
        environment = os.environ | _engine_environment(
            self._socket_dir.name, config_path if settings.connector is not None else None
        )
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=engine_fds, env=environment
            )
        for fd in engine_fds:
            os.close(fd)
        self._boot_deadline = time.monotonic() + BOOT_SECONDS
        self._ready = False

    def wait_until_ready(self) -> None:
        """Return when the engine takes commands."""
        if not self._ready:
            self._read_answer(self._boot_deadline)
            self._ready = True

    def generate(self, prompt: list[int], num_tokens: int, *, score_prompt: bool = False) -> Generation:
        """Generate from token ids, greedily, and wait until what there was to save is in the pool."""
        self.begin_generate([prompt], num_tokens, score_prompt=score_prompt)
        (answer,) = self.end_generate()
        return answer

    def begin_generate(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        *,
        num_log_probs: int = ALL_LOG_PROBS,
        score_prompt: bool = False,
    ) -> None:
        """Begin to generate from some prompts at once; `end_generate` has to follow."""
        self._send(
            {
                "op": "generate",
                "prompts": prompts,
                "num_tokens": num_tokens,
                "num_log_probs": num_log_probs,
                "score_prompt": score_prompt,
            }
        )

    def end_generate(self, seconds: float = ANSWER_SECONDS) -> list[Generation]:
        """Wait for the answers, and for the saves that the requests left."""
        return [Generation(**answer) for answer in self._read_answer(time.monotonic() + seconds)["answers"]]

    def reset_prefix_cache(self) -> None:
        """Forget the engine's own cache, so that only the pool can hold a prefix."""
        if not self._ask({"op": "reset_prefix_cache"})["ok"]:
            raise RuntimeError(f"engine {self.name} would not reset its prefix cache")

    def arm(self, point: str) -> None:
        """Hold the engine when it next comes to a point of `store_gate`."""
        self._ask({"op": "arm", "point": point})

    def wait_at_gate(self) -> None:
        """Return when the engine is held at its gate."""
        # The answer would mean that it ended without ever coming there.
        fds = [self._reached_fd, self._answers.fileno()]
        readable, _, _ = select.select(fds, [], [], ANSWER_SECONDS)
        if self._reached_fd not in readable:
            raise RuntimeError(self._failure("did not come to its gate"))
        os.read(self._reached_fd, 1)

    def open_gate(self) -> None:
        """Let the engine go on."""
        os.write(self._opened_fd, b".")

    def state(self) -> State:
        """Return what the engine holds, and its counters."""
        return State(**self._ask({"op": "state"}))

    def evidence(self) -> dict[str, Any]:
        """Return whose classes the engine uses; see `engine_run.Engine.evidence`."""
        return self._ask({"op": "evidence"})

    def log(self) -> str:
        """Return what the engine has logged so far."""
        return self._log_path.read_text(errors="replace")

    def end(self) -> None:
        """Ask the process to end, so that several can do so at the same time; `close` waits for it."""
        if not self._ready:  # it would boot to the end before it sees that nobody wants it
            self._process.kill()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process, in good order where it can, and within a deadline."""
        try:
            self.end()
            os.close(self._opened_fd)
            self._process.wait(EXIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._answers.close()
            os.close(self._reached_fd)
            self._socket_dir.cleanup()

    def _ask(self, command: dict[str, object]) -> dict[str, Any]:
        self._send(command)
        return self._read_answer(time.monotonic() + ANSWER_SECONDS)

    def _send(self, command: dict[str, object]) -> None:
        if self._process.stdin is None:
            raise RuntimeError(f"engine {self.name} has no standard input")
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _read_answer(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError(self._failure("no answer before the deadline"))
            received = self._answers.read(1 << 20)
            if not received:
                raise RuntimeError(self._failure("ended without an answer"))
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> str:
        return f"engine {self.name}: {what}; the end of its log:\n{self.log()[-4000:]}"


def _engine_environment(socket_dir: str, config_path: Path | None) -> dict[str, str]:
    environment = {
        "MC_LOG_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # a fixed order of summation, and engines that boot side by side
        "PYTHONDONTWRITEBYTECODE": "",  # vLLM imports thousands of modules: compiling them anew takes most of a boot
        "PYTHONHASHSEED": "0",  # of the first block hash: engines with different ones share no keys
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core, scheduler and worker in the one process
        "VLLM_HOST_IP": "127.0.0.1",  # else the client announces an address of the outside network
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": socket_dir,
    }
    if config_path is not None:
        environment["MOONCAKE_CONFIG_PATH"] = str(config_path)
    return environment
