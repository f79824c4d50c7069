"""What scheduler and workers tell each other at every step. vLLM carries it, between processes by pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from mooncrate.requests import ReqMeta


@dataclass
class SaveOrder:
    """A save that every rank does its part of.

    Attributes:
        job_id: Its number; never used again in the life of an engine, as a request's name is.
        req: The request; its blocks stay alive until every rank has reported the job.
        num_saved_tokens: Tokens from the start that the pool has.
    """

    job_id: int
    req: ReqMeta
    num_saved_tokens: int = 0


@dataclass
class StepOrders(KVConnectorMetadata):
    """What the workers have to do.

    Attributes:
        loads: Requests to load.
        saves: Requests to save.
        is_idle: Whether nothing is computed in this step.
        drops_saves: Whether saves that wait are to be given up, because the cache was reset.
    """

    loads: list[ReqMeta] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    is_idle: bool = False
    drops_saves: bool = False


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What ranks have done since they were last asked.

    Attributes:
        ended_saves: By job id, how many ranks are done with a save.
        incomplete_saves: Those after which the pool may not have everything.
        failed_loads: Requests of which something did not arrive.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    incomplete_saves: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Adds what another rank reports."""
        if not isinstance(other, StepReport):
            raise TypeError(f"a {type(other).__name__} is no report of MooncrateConnector")
        for job_id, num_ranks in other.ended_saves.items():
            self.ended_saves[job_id] = self.ended_saves.get(job_id, 0) + num_ranks
        self.incomplete_saves |= other.incomplete_saves
        self.failed_loads |= other.failed_loads
        return self
