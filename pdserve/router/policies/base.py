"""What a placement policy is: a pure choice among eligible workers. It suggests; the planner disposes.

A policy is given workers that may all be used, in a fixed order, never none, and returns one of them with
the reason as one word. It holds no lock, clock or random source: `Facts.turn` counts requests and serves
to break ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pdserve.router.fleet import Worker
from pdserve.router.schema import Facts


class Choice(NamedTuple):
    """A worker and why, in one word for the log line and the `x-pdserve-plan` header."""

    worker: Worker
    reason: str


class Policy(Protocol):
    """Chooses one of the eligible workers."""

    def choose(self, facts: Facts, workers: Sequence[Worker], last_id: str | None) -> Choice:
        """One of `workers` (never empty). `last_id` is the worker of the session's last turn, if known."""
        ...
