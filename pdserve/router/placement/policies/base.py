"""The interface of placement policies: a pure choice among eligible workers.

A policy gets at least one worker, in a fixed order, and returns one of them with the reason. It uses no
lock, clock or random source. Randomness (`Ask.draw`) and times are part of its argument.

Policies of other packages are found by name through the entry point group `pdserve.router.policies`. Such an
entry point is called with `PolicySettings` and returns a `Policy`:

    [project.entry-points."pdserve.router.policies"]
    nearest = "my_package.nearest:Nearest"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import Places


class Ask(msgspec.Struct, frozen=True, gc=False):
    """The facts of a request that a policy may use."""

    prompt_tokens: int = 0
    """Estimated number of tokens."""
    session: str | None = None
    """The session's name, equal at every router. None: the request has no session."""
    last_id: str | None = None
    """The worker of the session's last turn, if known."""
    turn: int = 0
    """Number of the request at this router. Policies use it to alternate between equal workers."""
    draw: int = 0
    """A random number of 32 bits."""
    places: Places | None = None
    """Estimated places of the prompt's prefix. None: unknown, or no policy uses them."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A worker, and the reason as a word and figures for the log line and `x-pdserve-plan`."""

    worker: Worker
    reason: str
    figures: str = ""
    cause: str = ""
    """A more precise reason for metrics, from a small set of words. Empty: `reason` is used."""

    def __str__(self) -> str:
        return f"{self.reason}({self.figures})" if self.figures else self.reason


class Policy(Protocol):
    """Chooses one of the eligible workers."""

    needs_places: bool
    """Whether the policy uses `Ask.places`, which costs some microseconds to make."""

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """One of `workers` (never empty). Raises NoWorkerError if none of them may be used."""
        ...


class PolicySettings(msgspec.Struct, frozen=True):
    """The settings that an entry point gets to make a policy."""

    stickiness: Session = Session()
    weights: PlacementSettings = PlacementSettings()
