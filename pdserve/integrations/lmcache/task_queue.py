"""One kind of tasks of an engine: a thread that runs them in order, and an eventfd that says when some are
done.

Every task is answered once: by what it returned, or by its `otherwise` where it was not run. It is not run if
too many wait, if it has waited for too long, or if the queue is closed. So a pool that is slow costs misses.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

logger = logging.getLogger(__name__)
R = TypeVar("R")

MAX_WAITING: Final = 256  # tasks; LMCache has 8 look-ups on their way at most
MAX_KEPT: Final = 65_536  # results that nobody has asked for


class _Task(NamedTuple, Generic[R]):
    number: int
    run: Callable[[], R]
    otherwise: Callable[[], R]
    submitted_s: float


class TaskQueue(Generic[R]):
    """Thread-safe."""

    def __init__(
        self, name: str, longest_wait_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.event_fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[_Task[R]] = deque()
        self._done: OrderedDict[int, R] = OrderedDict()
        self._last = 0
        self._closed = False
        self._is_open = True  # the descriptor
        self.refused = 0
        """Tasks that were answered without being run."""
        self._thread = threading.Thread(target=self._serve, name=f"pdserve-{name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], R], otherwise: Callable[[], R]) -> int:
        """The task's number. `run` is called on the queue's thread, or `otherwise` is, on any. A result of
        None is not kept.
        """
        with self._changed:
            self._last += 1
            task = _Task(self._last, run, otherwise, self._clock())
            if not self._closed and len(self._waiting) < MAX_WAITING:
                self._waiting.append(task)
                self._changed.notify_all()
                return task.number
            self.refused += 1
        self._finish(task, otherwise())
        return task.number

    def pop(self, number: int) -> R | None:
        """The task's result, once; None: it is not done."""
        with self._changed:
            return self._done.pop(number, None)

    def pop_all(self) -> dict[int, R]:
        """The results of all tasks that are done, each once."""
        with self._changed:
            done, self._done = dict(self._done), OrderedDict()
        return done

    def close(self, timeout_s: float) -> bool:
        """End the thread, after the task that it runs. False: it was not done in time, and goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("%s has not ended within %.0f s", self._thread.name, timeout_s)
            return False
        with self._changed:
            if self._is_open:
                self._is_open = False
                os.close(self.event_fd)
        return True

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            if self._closed or self._clock() - task.submitted_s > self._longest_wait_s:
                self.refused += 1
                self._finish(task, task.otherwise())
                continue
            try:
                result = task.run()
            except Exception:  # boundary: the engine waits for an answer of every task
                logger.exception("a task of %s failed (a bug; treated as a miss)", self._thread.name)
                result = task.otherwise()
            self._finish(task, result)

    def _next(self) -> _Task[R] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _finish(self, task: _Task[R], result: R) -> None:
        with self._changed:
            if result is not None:
                self._done[task.number] = result
            while len(self._done) > MAX_KEPT:
                self._done.popitem(last=False)
            if self._is_open and result is not None:  # else the descriptor may be somebody else's
                os.eventfd_write(self.event_fd, 1)
