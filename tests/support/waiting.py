"""Waiting with a deadline for what another thread or process does in its own time, where no event tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

SOON_S: Final = 20.0
"""No bound of the product's: after it a test is taken to hang."""
POLL_S: Final = 0.005


def soon(seconds: float = SOON_S) -> float:
    """A deadline on the monotonic clock."""
    return time.monotonic() + seconds


def until(
    holds: Callable[[], object], what: object = "it did not become so", within_s: float = SOON_S
) -> None:
    """Fails, with `what`, where it does not hold in time."""
    deadline_s = soon(within_s)
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)


async def until_in_loop(holds: Callable[[], bool | Awaitable[bool]], within_s: float = SOON_S) -> None:
    """The same in an event loop."""
    deadline_s = soon(within_s)
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline_s
        await asyncio.sleep(POLL_S)
