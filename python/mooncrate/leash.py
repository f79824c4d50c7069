"""Runs a command for as long as its own standard input stays open: a script, ``python leash.py SECONDS COMMAND...``.

A process killed with SIGKILL cannot stop what it started. The kernel does close its end of a pipe, though, however it
dies: this script waits for that, then terminates the command, and kills it if it is still there SECONDS later. It
prints the command's process id to standard output, and ends with the command's exit code (128 + n for signal n). What
the command prints goes to standard error. If this script is killed, the kernel kills the command (PR_SET_PDEATHSIG).

Why the parent does not set PR_SET_PDEATHSIG itself: that needs code between fork and exec, which is unsafe in a process
with threads, and it fires when the *thread* that forked ends, not the process. This script has a single thread when it
forks, and that one lives to the end.

Limitations: a child that the parent *forks* without exec holds the pipe open for as long as it lives.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def main(grace_seconds: float, command: list[str]) -> None:
    """Runs the command; never returns."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    pid = os.getpid()

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != pid:  # it died before the line above
            os._exit(1)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - safe: there is no other thread yet
    )

    def leave_with_command() -> None:
        code = process.wait()
        os._exit(code if code >= 0 else 128 - code)

    waiter = threading.Thread(target=leave_with_command)
    waiter.start()
    with contextlib.suppress(BrokenPipeError):  # the parent died before it could ask: its input has ended as well
        os.write(1, f"{process.pid}\n".encode())
    while os.read(0, 4096):
        pass
    process.terminate()
    waiter.join(grace_seconds)
    process.kill()
    waiter.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
