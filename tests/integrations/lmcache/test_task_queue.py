"""A queue's promises: every task is answered once, and none waits for long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from pdserve.integrations.lmcache import task_queue
from pdserve.integrations.lmcache.task_queue import TaskQueue
from tests.support.waiting import until


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Iterator[TaskQueue[str]]:
    made: TaskQueue[str] = TaskQueue("test", 5.0, clock=clock)
    yield made
    assert made.close(20)


class Held:
    """A task that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(20)
        return "held"


def result(queue: TaskQueue[str], number: int) -> str:
    found: list[str] = []

    def is_done() -> bool:
        found.extend(one for one in [queue.pop(number)] if one is not None)
        return bool(found)

    until(is_done)
    return found[0]


def missed() -> str:
    return "missed"


def failing() -> str:
    raise RuntimeError("a bug")


def test_results_come_once_by_number(queue: TaskQueue[str]) -> None:
    first, second = (queue.submit(task, missed) for task in (lambda: "a", lambda: "b"))
    assert (result(queue, second), result(queue, first)) == ("b", "a")
    assert queue.pop(first) is None
    assert os.eventfd_read(queue.event_fd) == 2


def test_a_task_that_has_waited_too_long_is_not_run(queue: TaskQueue[str], clock: Clock) -> None:
    held = Held()
    running = queue.submit(held, missed)
    assert held.begun.wait(20)
    late = queue.submit(failing, missed)
    clock.now_s = 6.0
    held.go_on.set()
    assert (result(queue, running), result(queue, late)) == ("held", "missed")
    assert queue.refused == 1


def test_tasks_beyond_the_bound_are_answered_at_once(
    queue: TaskQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_queue, "MAX_WAITING", 1)
    held = Held()
    queue.submit(held, missed)
    assert held.begun.wait(20)
    waiting, beyond = queue.submit(lambda: "ran", missed), queue.submit(failing, missed)
    assert queue.pop(beyond) == "missed"
    assert os.eventfd_read(queue.event_fd) == 1
    held.go_on.set()
    assert result(queue, waiting) == "ran"


@pytest.mark.parametrize("submit", ["before", "after"])
def test_tasks_of_a_closed_lane_are_answered(clock: Clock, submit: str) -> None:
    queue: TaskQueue[str] = TaskQueue("test", 5.0, clock=clock)
    held = Held()
    queue.submit(held, missed)
    assert held.begun.wait(20)
    numbers = [queue.submit(failing, missed)] if submit == "before" else []
    closing = threading.Thread(target=queue.close, args=(20,))
    closing.start()
    until(lambda: queue.submit(failing, missed) in queue.pop_all() or bool(numbers))
    held.go_on.set()
    closing.join(20)
    assert all(result(queue, number) == "missed" for number in numbers)
    with pytest.raises(OSError):
        os.eventfd_read(queue.event_fd)
    assert queue.close(20)


def test_a_lane_that_does_not_end_keeps_its_descriptor(clock: Clock) -> None:
    """Else it would signal whoever has the number next."""
    queue: TaskQueue[str] = TaskQueue("test", 5.0, clock=clock)
    held = Held()
    queue.submit(held, missed)
    assert held.begun.wait(20)
    assert not queue.close(0.01)
    with suppress(BlockingIOError):
        os.eventfd_read(queue.event_fd)
    held.go_on.set()
    assert queue.close(20)


def test_a_bug_is_a_miss(queue: TaskQueue[str]) -> None:
    tasks: list[Callable[[], str]] = [failing, lambda: "ran"]
    numbers = [queue.submit(task, missed) for task in tasks]
    assert [result(queue, number) for number in numbers] == ["missed", "ran"]


def test_results_that_nobody_asks_for_are_bounded(
    queue: TaskQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_queue, "MAX_KEPT", 2)
    numbers = [queue.submit(lambda: "x", missed) for _ in range(4)]
    assert result(queue, numbers[-1]) == "x"
    assert queue.pop(numbers[0]) is None
