"""One prompt that many ask for at once is computed once. Pure.

Agents that start together, and the rollouts of one prompt, send the same long beginning within milliseconds.
Until the first of them is computed, no cache has it, so each would be computed, on all workers at once.
Instead one request *leads*: its prompt goes to a prefill worker. Others with the same blocks *follow*: they
wait, and find its pages in the pool.

    begin -> leads   -> end(computed) -> its followers are told
                     -> end(failed)   -> the first follower leads in its place; the others follow that one
    begin -> follows -> told that it is computed, or that it leads now
                     -> leave: its deadline has passed, or its client has left

- A request follows only where that saves it half of what it would compute, and where the leader computes at
  most twice of what they share: else it would wait for the prompt of somebody else.
- Every block of a leader's prompt leads to it, so a follower need not have the same end.
- Leaders are bounded, so their blocks are. A request beyond the bound computes its prompt for itself alone.
  Followers are requests that were let in, and each has its own deadline.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from pdserve.router.placement.prefix_index import Prefix

R = TypeVar("R", bound=Hashable)
MAX_LEADERS: Final = 256
"""Prompts that are computed at a time; each has at most `MAX_BLOCKS` blocks."""
MOST_OF_ALL: Final = 2
"""A request saves at least one part of so many, and the leader computes at most so much more."""


class Flight(Generic[R]):
    """A prompt that is being computed, its leader, and who follows: with how many of the leader's blocks."""

    __slots__ = ("followers", "leader", "prefix")

    def __init__(self, leader: R, prefix: Prefix) -> None:
        self.leader = leader
        self.prefix = prefix
        self.followers: dict[R, int] = {}


class SingleFlight(Generic[R]):
    """The prompts that are being computed. `R`: what names a request."""

    def __init__(self, most_leaders: int = MAX_LEADERS) -> None:
        self._most_leaders = most_leaders
        self._by_block: dict[int, Flight[R]] = {}
        self._led: dict[R, Flight[R]] = {}
        self._followed: dict[R, tuple[Flight[R], Prefix]] = {}

    def begin(self, request: R, prefix: Prefix, prompt_tokens: int, uncached_tokens: int) -> bool:
        """Whether the request follows another one; if not, it leads or is on its own, until `end`.

        `uncached_tokens`: of its `prompt_tokens`, what it would have to compute, an estimate.
        """
        flight, shared = self._find(prefix)
        if flight is not None:
            tokens = prefix.tokens(shared)
            saved = tokens - (prompt_tokens - uncached_tokens)
            whole = flight.prefix.tokens(len(flight.prefix.digests))
            if 0 < saved >= uncached_tokens / MOST_OF_ALL and whole <= MOST_OF_ALL * tokens:
                flight.followers[request] = shared
                self._followed[request] = flight, prefix
                return True
        if prefix.digests and len(self._led) < self._most_leaders:
            self._lead(Flight(request, prefix))
        return False

    def leave(self, follower: R) -> None:
        """The request no longer follows. No effect where it does not."""
        flight, _ = self._followed.pop(follower, (None, None))
        if flight is not None:
            del flight.followers[follower]

    def end(self, leader: R, *, computed: bool) -> tuple[dict[R, int], R | None]:
        """The leader's prompt is computed, or has failed. Returns the followers for whom it is computed, with
        the blocks that they share, and the one that leads now. They are followers no more. Nobody, where the
        request does not lead.
        """
        flight = self._led.pop(leader, None)
        if flight is None:
            return {}, None
        for digest in flight.prefix.digests:
            if self._by_block.get(digest) is flight:
                del self._by_block[digest]
        followers = flight.followers
        if computed or not followers:
            for follower in followers:
                del self._followed[follower]
            return followers, None
        first = next(iter(followers))
        _, prefix = self._followed.pop(first)
        shared = followers.pop(first)
        successor = Flight(first, prefix)
        for follower, blocks in followers.items():
            successor.followers[follower] = min(blocks, shared)
            self._followed[follower] = successor, self._followed[follower][1]
        self._lead(successor)
        return {}, first

    def _find(self, prefix: Prefix) -> tuple[Flight[R] | None, int]:
        """The flight with the longest beginning in common, and its blocks."""
        if self._by_block:
            for number in range(len(prefix.digests), 0, -1):
                if (flight := self._by_block.get(prefix.digests[number - 1])) is not None:
                    return flight, number
        return None, 0

    def _lead(self, flight: Flight[R]) -> None:
        self._led[flight.leader] = flight
        for digest in flight.prefix.digests:
            self._by_block.setdefault(digest, flight)
