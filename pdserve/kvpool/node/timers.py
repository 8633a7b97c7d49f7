"""A timer of the event loop that is not set again and again in the same instant, and a clock for gossip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

CLOCK_STEP_S: Final = 0.001  # of uvloop's clock and timers
_STARTED_NS: Final = time.time_ns() - time.monotonic_ns()


def call_at(
    loop: asyncio.AbstractEventLoop, at_s: float, callback: Callable[..., object], *arguments: Any
) -> asyncio.TimerHandle:
    """As the loop's own, but no sooner than one step of its clock from now. uvloop calls at once what is due
    within half a step. A callback that then looks at the clock, finds that it is not due and sets its timer
    again would spin until the next step, with a processor that the clients of the node may want.
    """
    return loop.call_at(max(at_s, loop.time() + CLOCK_STEP_S), callback, *arguments)


def clock_ms() -> int:
    """Milliseconds since 1970. It does not fall when somebody sets the machine's clock back."""
    return max(time.time_ns(), _STARTED_NS + time.monotonic_ns()) // 1_000_000
