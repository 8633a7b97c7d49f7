"""A coroutine without a task: what it waits for, how it ends, and what it may await as a task may."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pdserve.router.http.driven import Driven, Pause, PlainPause, in_task, pass_on


class Steps(Driven):
    """Notes what its coroutine does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.ended = 0
        self.over = asyncio.Event()

    def on_end(self) -> None:
        self.ended += 1
        self.over.set()


@pytest.mark.parametrize("pause", dict.fromkeys((PlainPause, Pause)))  # one where none is compiled
async def test_it_goes_on_when_it_is_resumed_and_ends_once(pause: type[PlainPause]) -> None:
    steps = Steps()
    steps.news = pause()

    async def work() -> None:
        for number in range(2):
            await steps.news
            steps.seen.append(number)

    steps.run(work())
    assert (steps.seen, steps.ended) == ([], 0)
    steps.resume()
    assert steps.seen == [0]
    for _ in range(3):  # one too many does nothing
        steps.resume()
        steps.throw(asyncio.CancelledError())
    assert (steps.seen, steps.ended) == ([0, 1], 1)


async def test_it_awaits_futures_tasks_and_what_is_made_of_them() -> None:
    steps, future = Steps(), asyncio.get_running_loop().create_future()

    async def work() -> None:
        steps.seen.append(await future)
        await pass_on()
        steps.seen.append(await in_task(asyncio.sleep(0, "task")))
        steps.seen.append(await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2)))
        with pytest.raises(TimeoutError):
            await in_task(asyncio.sleep(60), 0.001)

    steps.run(work())
    future.set_result("future")
    await steps.over.wait()
    assert steps.seen == ["future", "task", [1, 2]]


@pytest.mark.parametrize("waits", ["news", "future", "task"])
async def test_what_is_thrown_is_raised_where_it_waits_and_everything_is_let_go_in_order(waits: str) -> None:
    steps, loop = Steps(), asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    sleeping = asyncio.Event()

    async def sleep() -> None:
        sleeping.set()
        try:
            await asyncio.sleep(60)
        finally:
            steps.seen.append("task ends")

    async def work() -> None:
        try:
            try:
                if waits == "task":
                    await in_task(sleep())
                else:
                    await (steps.news if waits == "news" else future)
            finally:
                steps.seen.append("inner")
        finally:
            steps.seen.append("outer")

    steps.run(work())
    if waits == "task":
        await sleeping.wait()
    steps.throw(asyncio.CancelledError())
    assert (steps.seen, steps.ended) == (["inner", "outer"], 1)
    if not future.done():
        future.set_result(None)  # comes too late
    await pass_on()
    assert steps.seen == ["inner", "outer", *(["task ends"] if waits == "task" else [])]


async def test_a_bug_in_it_is_told_to_who_resumed_it_and_it_is_over() -> None:
    steps = Steps()

    async def work() -> None:
        await steps.news
        raise ValueError("a bug")

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        steps.run(coroutine)
        steps.resume()

    with pytest.raises(ValueError, match="a bug"):
        run(work())
    steps.resume()
    assert steps.ended == 1
