"""Counts the calls into one package while an engine serves requests, without touching its objects.

A wrapper around the classes under test would be one more thing in place of the real ones, and cannot be put around a
class of an extension module. The interpreter's profile events name each function as it is entered, Python or not.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CallCounter:
    """Calls of functions whose module's name starts with one of some prefixes, by ``module.function``."""

    def __init__(self, *module_prefixes: str) -> None:
        """Count nothing until `threads` or `this_thread` is called."""
        self.counts: Counter[str] = Counter()
        self._prefixes = module_prefixes
        self._lock = threading.Lock()

    def threads(self) -> None:
        """Count from now on in every thread that `threading` starts from now on."""
        threading.setprofile(self._on_event)

    @contextmanager
    def this_thread(self) -> Iterator[None]:
        """Count in the calling thread, inside the block."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        elif event == "c_call":
            module, function = _module_of(argument), getattr(argument, "__name__", "?")
        else:
            return
        if isinstance(module, str) and module.startswith(self._prefixes):
            with self._lock:
                self.counts[f"{module}.{function}"] += 1


def _module_of(function: object) -> object:
    """Return the module of a function of an extension: its own, or that of the class whose method it is."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type(sys)):
        return getattr(function, "__module__", None)
    return (owner if isinstance(owner, type) else type(owner)).__module__
