"""Why a request went where: the newest requests, kept for administrators. Pure.

Keeping one costs less than a microsecond: bytes are kept as they are, and become text when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One request that is over. It holds no prompt, answer or key."""

    ended_s: float
    """Unix time."""
    request_id: bytes
    route: str
    status: int
    """Of HTTP; 0: the client left before there was one."""
    tenant: str
    model: str
    phase: str
    """In which the request ended: body, plan, queue, settle, prefill, decode or stream."""
    ended_by: str
    """What ended it early: client, deadline, worker; empty: nothing did."""
    urgency: int
    seconds: float
    first_byte_s: float
    plan: bytes
    """What decided, as in `x-pdserve-plan`, with its figures."""
    workers: list[tuple[bytes, bytes]]
    """Headers that name the workers, and what they had cached."""
    parts_s: dict[str, float] = {}
    """Parts of the time to the first token (`names.PARTS`)."""

    def told(self) -> dict[str, Any]:
        """For people."""
        said = msgspec.structs.asdict(self)
        said["request_id"] = self.request_id.decode("ascii", "replace")
        said["plan"] = self.plan.decode("ascii", "replace")
        said["workers"] = {
            name.decode("ascii"): value.decode("ascii", "replace") for name, value in self.workers
        }
        said |= {name: round(said[name], 4) for name in ("ended_s", "seconds", "first_byte_s")}
        said["parts_s"] = {name: round(spent_s, 4) for name, spent_s in self.parts_s.items()}
        return said


Decisions = deque[Decision]
"""The newest at the end. Its `maxlen` is the bound."""


def newest(decisions: Iterable[Decision], limit: int, request_id: bytes = b"") -> list[Decision]:
    """At most `limit` of them, the newest first; those of the request, where there is an id."""
    wanted = [one for one in decisions if not request_id or one.request_id == request_id]
    return sorted(wanted, key=lambda one: -one.ended_s)[:limit]
