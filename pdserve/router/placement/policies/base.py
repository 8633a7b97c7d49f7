"""What a placement policy is: a pure choice among eligible workers. It suggests; the planner disposes.

A policy is given workers that may all be used, in a fixed order, never none, and returns one of them with
the reason. It holds no lock, clock or random source: what is random comes in with the question (`Ask.draw`),
and so does everything that is known about time.

Policies of other packages are found by name through the entry point group `pdserve.router.policies`. Such an
entry point is called with `PolicySettings` and returns a `Policy`:

    [project.entry-points."pdserve.router.policies"]
    nearest = "my_package.nearest:Nearest"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from pdserve.router.config.placement import PlacementSettings, Stickiness
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import Places


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a policy is asked: where should this request go?"""

    prompt_tokens: int = 0
    """Estimated."""
    session: str | None = None
    """The session's name, the same at every router; None: the request belongs to none."""
    last_id: str | None = None
    """The worker of the session's last turn, if known."""
    turn: int = 0
    """Number of the request at this router: lets equals take turns."""
    draw: int = 0
    """A random number of 32 bits."""
    places: Places | None = None
    """Where the prompt's beginning lives; None: nothing is known, or no policy asks."""


class Choice(NamedTuple):
    """A worker and why: a word, and figures where there are any, for log line and `x-pdserve-plan`."""

    worker: Worker
    reason: str
    figures: str = ""
    cause: str = ""
    """What made the difference, where `reason` leaves that open: a word for metrics, out of a few."""

    def __str__(self) -> str:
        return f"{self.reason}({self.figures})" if self.figures else self.reason


class Policy(Protocol):
    """Chooses one of the eligible workers."""

    needs_places: bool
    """Whether it looks at `Ask.places`, which costs some microseconds to make."""

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """One of `workers` (never empty). Raises NoWorkerError if the request must rather wait."""
        ...


class PolicySettings(msgspec.Struct, frozen=True):
    """What a policy is made from."""

    stickiness: Stickiness = Stickiness()
    weights: PlacementSettings = PlacementSettings()
