"""When a worker that was asked to stop is at its end, and what its guard does meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Guard
from tests.support.engine.manager import Client, scope_of

ROUTER, OTHER = ("10.0.0.1", 4001), ("10.0.0.2", 4002)


def draining() -> tuple[Drain, set[tuple[str, int]]]:
    """A drain of at most 30 s, of which 3 s of notice; and who is connected, to be changed."""
    connected = {ROUTER, OTHER}
    return Drain(30.0, 3.0, connected=lambda: connected), connected


def test_a_worker_that_has_nothing_to_do_and_nobody_to_tell_ends_at_once() -> None:
    drain, _ = draining()
    assert not drain.is_draining
    drain.begin(10.0)
    assert (drain.is_draining, drain.is_over(10.0), drain.is_closed) == (True, True, True)


def test_running_requests_and_pages_under_way_are_waited_for() -> None:
    drain, _ = draining()
    pages = 0
    drain.add(lambda: pages)
    drain.running = 1
    drain.begin(10.0)
    assert not drain.is_over(20.0)
    drain.running, pages = 0, 2
    assert (drain.is_over(21.0), drain.is_closed) == (False, False)
    pages = 0
    assert drain.is_over(22.0)


@pytest.mark.parametrize("is_hurried", [False, True])
def test_the_deadline_or_being_asked_once_more_ends_the_wait(is_hurried: bool) -> None:
    drain, _ = draining()
    drain.running = 1
    drain.begin(10.0)
    assert (drain.left_s(15.0), drain.is_over(39.9)) == (25.0, False)
    if is_hurried:
        drain.begin(39.9)
    over_s = 39.9 if is_hurried else 40.0
    assert (drain.left_s(over_s), drain.is_over(over_s)) == (0.0, True)


def test_every_connected_router_hears_of_it_first() -> None:
    drain, connected = draining()
    drain.asked(ROUTER, 9.5)
    drain.asked(OTHER, 9.8)
    drain.begin(10.0)
    assert not drain.is_over(10.0)
    drain.asked(ROUTER, 10.5)
    assert not drain.is_over(10.6)
    connected.remove(OTHER)  # it has ended: nobody to be told
    assert drain.is_over(10.7)


def test_a_router_that_does_not_ask_again_is_waited_for_the_notice_only() -> None:
    drain, _ = draining()
    drain.asked(ROUTER, 9.5)
    drain.begin(10.0)
    assert [drain.is_over(now_s) for now_s in (12.9, 13.0)] == [False, True]


def test_who_has_not_asked_for_long_is_no_router() -> None:
    drain, _ = draining()
    drain.asked(OTHER, 1.0)
    drain.asked(ROUTER, 30.0)
    drain.begin(45.0)
    assert drain.is_over(45.0)


async def test_requests_are_counted_until_they_are_answered_and_refused_once_it_is_over() -> None:
    drain, client = draining()[0], Client()
    seen: list[tuple[str, int]] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append((scope["path"], drain.running))

    async def ask(path: str) -> None:
        await Guard(app, "", lambda: True, drain)(scope_of(path), client.messages.get, client.send)

    drain.begin(0.0)
    await ask("/generate")
    assert (seen, drain.running, drain.is_over(0.0)) == ([("/generate", 1)], 0, True)
    await ask("/pd/ready")
    await ask("/generate")
    assert seen == [("/generate", 1), ("/pd/ready", 0)]
    assert client.sent[0]["status"] == 503
    assert json.loads(client.sent[1]["body"])["error"]["code"] == "worker_stopping"


async def test_a_worker_that_stops_waits_for_websockets_and_takes_no_new_ones() -> None:
    drain, client, over = draining()[0], Client(), asyncio.Event()

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await over.wait()

    guard, scope = Guard(app, "", lambda: True, drain), {**scope_of("/v1/realtime"), "type": "websocket"}
    session = asyncio.create_task(guard(scope, client.messages.get, client.send))
    await asyncio.sleep(0)
    assert drain.running == 1
    drain.is_closed = True
    await guard(scope, client.messages.get, client.send)
    assert [message["type"] for message in client.sent] == ["websocket.close"]
    over.set()
    await session
    assert drain.running == 0
