"""Requests that wait for a prompt which is being computed for another one (see `placement.single_flight`)."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.placement.single_flight import SingleFlight
from pdserve.router.request.request import Request


class Computed(NamedTuple):
    """A prompt that was computed; for a follower with what it shares of it."""

    worker: Worker
    """That has it in its memory."""
    is_in_pool: bool
    """All of its pages are in the pool."""
    turns_line: bytes
    """See `Request.turns_line`."""
    shared_blocks: int = 0

    def is_whole(self, facts: RequestFacts) -> bool:
        """No full block of the follower's prompt is left."""
        return facts.prefix is not None and self.shared_blocks == len(facts.prefix.digests)

    def rest_tokens(self, facts: RequestFacts) -> int:
        """What is left of the follower's prompt."""
        assert facts.prefix is not None
        return max(0, facts.prompt_tokens_estimate - facts.prefix.tokens(self.shared_blocks))


class SharedPrefills:
    """The prefill stages under way that others can share. Make it inside the running loop.

    A request asks `begin`. Where that says that it follows, it must `wait`; else, and where `wait` says that
    it leads now, it has the prompt computed and must `end`, however that went.
    """

    def __init__(self) -> None:
        self._flights: SingleFlight[Request] = SingleFlight()
        self._told: dict[Request, asyncio.Future[Computed | None]] = {}
        self._loop = asyncio.get_running_loop()

    def begin(self, request: Request, uncached_tokens: int) -> bool:
        """Whether the request follows another one. `uncached_tokens`: what it would compute of its prompt."""
        prefix = request.facts.prefix
        if prefix is None or not self._flights.begin(
            request, prefix, request.facts.prompt_tokens_estimate, uncached_tokens
        ):
            return False
        self._told[request] = self._loop.create_future()
        return True

    async def wait(self, request: Request, end_s: float) -> Computed | None:
        """What was computed for the request's leader; None: that has failed, and the request leads now.
        Raises TimeoutError at `end_s` on the loop's clock.
        """
        told = self._told[request]
        try:
            await asyncio.wait({told}, timeout=end_s - self._loop.time())
            if not told.done():
                told.cancel()
                raise TimeoutError
            return told.result()
        except BaseException:  # too late, or the client has left
            self._flights.leave(request)
            if not told.cancelled() and told.done() and told.result() is None:
                self.end(request, None)  # it leads since a moment ago
            raise
        finally:
            del self._told[request]

    def end(self, request: Request, computed: Computed | None) -> None:
        """The request has had its prompt computed; None: that failed, and another one leads. Of a
        request that does not lead, nothing ends.
        """
        leader: Request | None = request
        while leader is not None:
            followers, leader = self._flights.end(leader, computed=computed is not None)
            for follower, blocks in followers.items():
                assert computed is not None
                self._tell(follower, computed._replace(shared_blocks=blocks))
            if leader is not None and self._tell(leader, None):
                return
            computed = None

    def _tell(self, request: Request, what: Computed | None) -> bool:
        """Whether the request can still hear it: its client may have left a moment ago."""
        told = self._told[request]
        if told.done():
            return False
        told.set_result(what)
        return True
