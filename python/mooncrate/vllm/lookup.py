"""The scheduler's lookups: asked when a request could be scheduled, answered without blocking the step.

Rationale: an answer that was asked for at arrival would be old when the request's turn comes, and prompts that arrive
together share prefixes that the first of them is about to save. So the question comes late. It is given a little time,
once per step for all requests, because a store that is near answers within it and an idle engine would only spin.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from mooncrate.pool import KVPool

WAIT_SECONDS: Final = 0.004
"""For all lookups of one step."""
ANSWER_SECONDS: Final = 1.0
"""How long after the question its answer is good, for a request that could not be scheduled at once."""


@dataclass
class _Question:
    answer: Future[int]
    num_tokens: int
    good_until: float


class PrefixLookups:
    """What the pool has of requests that wait. For one thread."""

    def __init__(self, pool: KVPool, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Asks a pool.

        Args:
            pool: The pool.
            timeout: Seconds after which an answer is 0, whatever the store does.
            clock: Seconds that never go back.
        """
        self._pool = pool
        self._timeout = timeout
        self._clock = clock
        self._questions: dict[str, _Question] = {}
        self._wait_left = WAIT_SECONDS

    def num_hit_tokens(self, request: Request) -> int | None:
        """Returns how many tokens of a request the pool has, or None while that is not known."""
        question = self._questions.get(request.request_id)
        now = self._clock()
        if (
            question is None
            or question.num_tokens != request.num_tokens
            or (question.answer.done() and now > question.good_until)
        ):
            answer = self._pool.lookup_async(request.num_tokens, request.block_hashes, self._timeout)
            question = _Question(answer, request.num_tokens, now + ANSWER_SECONDS)
            self._questions[request.request_id] = question
        if not question.answer.done() and self._wait_left > 0:
            wait([question.answer], self._wait_left)
            self._wait_left -= self._clock() - now
        return question.answer.result() if question.answer.done() else None

    def begin_step(self) -> None:
        """Gives time to wait again."""
        self._wait_left = WAIT_SECONDS

    def forget(self, req_id: str) -> None:
        """Drops what was asked for a request; its next lookup asks anew."""
        self._questions.pop(req_id, None)

    def clear(self) -> None:
        """Drops everything that was asked."""
        self._questions.clear()
