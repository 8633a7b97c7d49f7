"""Service levels, and what a step of a worker takes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Kept = Literal["met", "ttft", "itl", "both"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each request should get. The router keeps to it by the duties of elastic workers, and by what it
    does with requests that cannot get it (the tenants' `on_slo_miss`).
    """

    ttft_ms: Annotated[
        float, Meta(ge=0, description="Longest time to the first token, in ms; 0: no level.")
    ] = 0.0
    itl_ms: Annotated[
        float,
        Meta(ge=0, description="Longest mean time between two tokens of an answer, in ms; 0: no level."),
    ] = 0.0
    step_ms: Annotated[
        float, Meta(ge=0, description="Time of a decode step of a worker that answers nobody else, in ms.")
    ] = 10.0
    step_ms_per_request: Annotated[
        float, Meta(ge=0, description="Time that each request adds to a decode step, in ms.")
    ] = 0.1
    window_s: Annotated[float, Meta(gt=0, description="Time constant of the running means of the load.")] = (
        10.0
    )
    dwell_s: Annotated[
        float, Meta(ge=0, description="Shortest time between two changes of elastic workers' duties.")
    ] = 5.0

    def kept(self, ttft_ms: float, itl_ms: float) -> Kept:
        """What was missed by an answer with these times."""
        is_late = bool(self.ttft_ms) and ttft_ms > self.ttft_ms
        is_slow = bool(self.itl_ms) and itl_ms > self.itl_ms
        if is_late and is_slow:
            return "both"
        return "ttft" if is_late else "itl" if is_slow else "met"

    @property
    def is_set(self) -> bool:
        """There is a level to keep."""
        return bool(self.ttft_ms or self.itl_ms)
