"""When a worker that was asked to stop is at its end, and what its guard does meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Guard

ROUTER, OTHER = ("10.0.0.1", 4001), ("10.0.0.2", 4002)


def draining(**settings: Any) -> tuple[Drain, set[tuple[str, int]]]:
    """A drain of at most 30 s, of which 3 s of notice; and who is connected, to be changed."""
    connected = {ROUTER, OTHER}
    return Drain(**({"grace_s": 30.0, "notice_s": 3.0} | settings), connected=lambda: connected), connected


def test_a_worker_that_has_nothing_to_do_and_nobody_to_tell_ends_at_once() -> None:
    drain, _ = draining()
    assert not drain.is_draining
    drain.begin(10.0)
    assert drain.is_draining
    assert drain.is_over(10.0)
    assert drain.is_closed


def test_running_requests_and_pages_under_way_are_waited_for() -> None:
    drain, _ = draining()
    pages = 0
    drain.add(lambda: pages)
    drain.running = 1
    drain.begin(10.0)
    assert not drain.is_over(20.0)
    drain.running, pages = 0, 2
    assert not drain.is_over(21.0)
    assert not drain.is_closed
    pages = 0
    assert drain.is_over(22.0)


def test_the_deadline_ends_the_wait() -> None:
    drain, _ = draining()
    drain.running = 1
    drain.begin(10.0)
    assert drain.left_s(15.0) == 25.0
    assert not drain.is_over(39.9)
    assert drain.is_over(40.0)


def test_asked_to_stop_once_more_it_ends_at_once() -> None:
    drain, _ = draining()
    drain.running = 1
    drain.begin(10.0)
    assert not drain.is_over(11.0)
    drain.begin(12.0)
    assert drain.left_s(12.0) == 0.0
    assert drain.is_over(12.0)


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
    assert not drain.is_over(12.9)
    assert drain.is_over(13.0)


def test_who_asked_long_ago_is_forgotten() -> None:
    drain, _ = draining()
    drain.asked(OTHER, 1.0)
    drain.asked(ROUTER, 30.0)
    assert list(drain._asked_s) == [ROUTER]
    drain.begin(45.0)
    assert drain.is_over(45.0)


def test_requests_are_counted_until_they_are_answered_and_refused_once_it_is_over() -> None:
    drain, _ = draining()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads the body here")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], drain.running))

    async def ask(path: str) -> None:
        guard = Guard(app, "", lambda: True, drain)
        await guard({"type": "http", "path": path, "headers": []}, receive, send)

    seen: list[tuple[str, int]] = []
    drain.begin(0.0)
    asyncio.run(ask("/generate"))
    assert (seen, drain.running) == ([("/generate", 1)], 0)
    assert drain.is_over(0.0)
    asyncio.run(ask("/pd/ready"))
    asyncio.run(ask("/generate"))
    assert seen == [("/generate", 1), ("/pd/ready", 0)]
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "worker_stopping"
