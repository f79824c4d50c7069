"""Looks at the live objects of vLLM's Mooncake store connector inside an engine, without changing what they do."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


class ConnectorProbe:
    """The scheduler's and the worker's side of the connector of one engine, both in this process.

    Two functions of the connector get an observer that passes everything on: the scheduler's
    ``build_connector_meta``, whose result is all that the worker hears, and the worker's ``lookup``, which is handed
    the hashes. The classes seen there are the ones that really carry the data.
    """

    def __init__(self, llm: Any) -> None:  # noqa: ANN401 - vLLM's object, whose inner parts have no public type
        """Find both sides. ``llm`` must have been booted with the connector and without engine subprocesses."""
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        group: Any = get_kv_transfer_group()
        self._worker = group.connector_worker
        self._seen: Counter[str] = Counter()
        self._scheduler.build_connector_meta = self._observe(self._scheduler.build_connector_meta, self._see_meta)
        self._worker.lookup = self._observe(self._worker.lookup, self._see_lookup)

    def wait_for_saves(self) -> None:
        """Return when every save that the worker has queued is done, well or not."""
        self._worker.kv_send_thread.request_queue.join()

    def live_objects(self) -> dict[str, int]:
        """Return how many objects of which class were seen in which place, as ``place: module.class``."""
        return dict(self._seen) | dict(Counter(self._databases()))

    def _databases(self) -> Iterable[str]:
        for place, databases in (
            ("worker.token_dbs", self._worker.token_dbs),
            ("send_thread.token_databases", self._worker.kv_send_thread.token_databases),
            *(("recv_thread.token_databases", thread.token_databases) for thread in self._worker.kv_recv_threads),
        ):
            for database in databases:
                yield f"{place}: {_class_of(database)}"
                yield f"{place}.metadata: {_class_of(database.metadata)}"

    @staticmethod
    def _observe(function: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever vLLM passes
            result = function(*args, **kwargs)
            see(args, result)
            return result

        return observed

    def _see_meta(self, _args: tuple[Any, ...], meta: Any) -> None:  # noqa: ANN401 - either class may come
        # With workers in other processes, vLLM sends this object to them by pickle.
        copied = pickle.loads(pickle.dumps(meta))
        if [vars(request) for request in copied.requests] != [vars(request) for request in meta.requests]:
            raise RuntimeError("the metadata does not survive pickling")
        self._seen[f"metadata: {_class_of(meta)}"] += 1
        for request in meta.requests:
            self._seen[f"metadata.requests: {_class_of(request)}"] += 1
            if request.load_spec is not None:
                self._seen[f"load_spec: {_class_of(request.load_spec)}"] += 1
        for tracker in self._scheduler._request_trackers.values():
            self._seen[f"tracker: {_class_of(tracker)}"] += 1

    def _see_lookup(self, args: tuple[Any, ...], _result: object) -> None:
        self._seen[f"lookup.block_hashes: {_class_of(args[1])}"] += 1


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
