"""Timers of a node's event loop."""

from __future__ import annotations

import asyncio

import uvloop

from pdserve.kvpool.node.timers import call_at

LATE_S = 1.0  # a busy machine's


async def looks_until_due(within_s: float) -> int:
    """How often a callback runs that is set again until it is due."""
    loop, looks, done = asyncio.get_running_loop(), 0, asyncio.Event()
    at_s = loop.time() + within_s

    def look() -> None:
        nonlocal looks
        looks += 1
        if loop.time() >= at_s:
            assert loop.time() < at_s + LATE_S
            done.set()
        else:
            call_at(loop, at_s, look)

    call_at(loop, at_s, look)
    await asyncio.wait_for(done.wait(), 10.0)
    return looks


def test_what_is_due_within_a_step_of_the_clock_is_not_looked_at_without_end() -> None:
    for tenths_of_a_step in range(0, 25, 4):
        assert uvloop.run(looks_until_due(tenths_of_a_step / 10_000)) <= 2


def test_what_is_due_later_is_called_when_it_is_due() -> None:
    assert uvloop.run(looks_until_due(0.0504)) <= 2
