"""The service level that requests are measured against."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Kept = Literal["met", "ttft", "itl", "both"]


class ServiceLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each request should get: counted for streams, and used for the number of workers wanted."""

    ttft_ms: Annotated[
        float, Meta(ge=0, description="Longest time to the first token, in ms; 0: no level.")
    ] = 0.0
    itl_ms: Annotated[
        float,
        Meta(ge=0, description="Longest mean time between two tokens of an answer, in ms; 0: no level."),
    ] = 0.0

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
