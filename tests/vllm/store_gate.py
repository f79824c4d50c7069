"""A gate at which an engine waits until its parent lets it through, in the middle of a save or a load.

The parent can then take keys away or kill the master at exactly that moment, and needs no luck and no `sleep`. The gate
stands in front of the calls that any connector makes: two of Mooncake's client and one of the connector itself, which
vLLM calls when a lookup has been answered and the blocks are there, before anything is loaded. Shut it does nothing.
"""

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

ALLOCATED: Final = "allocated"
"""The lookup found a prefix and its blocks are allocated; no load has begun."""
PUT: Final = "put"
"""A save has asked what is missing, and is about to put it."""
GET: Final = "get"
"""A load is about to read from the store."""

STORE_CALLS: Final = {PUT: "batch_put_from_multi_buffers", GET: "batch_get_into_multi_buffers"}


class StoreGate:
    """Shut by `arm` for one passage."""

    def __init__(self, reached_fd: int, opened_fd: int) -> None:
        """Take the pipe that says that the gate was reached, and the one that opens it."""
        self._reached_fd = reached_fd
        self._opened_fd = opened_fd
        self._lock = threading.Lock()
        self._point: str | None = None

    def arm(self, point: str) -> None:
        """Hold whoever comes to this point next."""
        with self._lock:
            self._point = point

    def watch_store(self) -> None:
        """Put the gate in front of the client's calls; before any client is made, as they keep their methods."""
        store_class = import_module("mooncake.store").MooncakeDistributedStore
        for point, name in STORE_CALLS.items():
            setattr(store_class, name, self._before(getattr(store_class, name), point))

    def watch_connector(self, connector: Any) -> None:  # noqa: ANN401 - any connector of vLLM
        """Put the gate in front of the scheduler's word that blocks for a prefix of the pool are allocated."""
        update = connector.update_state_after_alloc

        def update_state_after_alloc(request: object, blocks: object, num_external_tokens: int) -> object:
            if num_external_tokens > 0:
                self._pass(ALLOCATED)
            return update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = update_state_after_alloc

    def _before(self, function: Callable[..., Any], point: str) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what it is given
            self._pass(point)
            return function(*args, **kwargs)

        return gated

    def _pass(self, point: str) -> None:
        with self._lock:
            if point != self._point:
                return
            self._point = None
        os.write(self._reached_fd, b".")
        os.read(self._opened_fd, 1)  # also returns when the parent is gone
