"""Remembers which steps of the set-up are done, by the content of what went into them and came out.

Modification times are not looked at: a fresh clone, a switched branch and a copied tree all change them without
changing anything. A step's stamp is removed before the step begins, so that one that was interrupted is done again.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.console import step


def fingerprint(*parts: object) -> str:
    """Returns a digest of JSON values; equal values, and only they, have equal digests."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def digest_of_files(root: Path, files: Iterable[Path]) -> str:
    """Returns a digest of the files' contents and of their paths below ``root``, in any order given."""
    return fingerprint(
        sorted((str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files)
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock against other set-ups of this checkout; the system frees it however the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("==> waiting for another set-up of this checkout", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Stamps:
    """The stamps of one environment: one small file for each step, in one directory."""

    def __init__(self, directory: Path) -> None:
        """Uses a directory, which need not exist yet."""
        self._directory = directory
        self.num_steps_done = 0

    def is_half_done(self, name: str) -> bool:
        """Returns whether a step was begun and not finished, so that a part of its result may lie about."""
        return self._begun(name).exists()

    def forget(self, name: str) -> None:
        """Makes the next `once` do a step whatever its key."""
        (self._directory / name).unlink(missing_ok=True)

    def once(
        self, name: str, key: str, title: str, action: Callable[[], None], outputs: Callable[[], str] = lambda: ""
    ) -> None:
        """Does a step unless it was done before.

        Args:
            name: The step.
            key: Digest of what goes into it.
            title: Said when it is done.
            action: Does it.
            outputs: Digest of what came out, for a step whose results others may overwrite.
        """
        path = self._directory / name
        if path.is_file() and path.read_text() == fingerprint(key, outputs()):
            return
        begun = self._begun(name)
        self.forget(name)
        self._directory.mkdir(parents=True, exist_ok=True)
        begun.touch()
        with step(title):
            action()
        self._directory.mkdir(parents=True, exist_ok=True)  # what was made may have replaced it
        # The write itself may be interrupted, and half a stamp must not be found.
        draft = path.with_name(f"{name}.draft")
        draft.write_text(fingerprint(key, outputs()))
        os.replace(draft, path)
        begun.unlink(missing_ok=True)
        self.num_steps_done += 1

    def _begun(self, name: str) -> Path:
        return self._directory / f"{name}.begun"
