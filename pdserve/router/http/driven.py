"""A coroutine that runs without a task: whoever it waits for resumes it.

`await driven.news` waits for `Driven.resume`, which a worker's connection calls in the callback that has read
the answer: no task, no future, no trip through the event loop on the usual path. Any future can be awaited as
in a task. Two rules follow:

- Nothing may resume one request from inside another: requests that fail at once would nest ever deeper. The
  next one is begun by `loop.call_soon`, and whoever waits in a queue waits for a future.
- Within the coroutine there is no current task: no `asyncio.timeout`, and no `asyncio.sleep(0)`, which would
  wait for ever (`pass_on` is for that). `in_task` has a task do what needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.logs import served_request

T = TypeVar("T")


class PlainPause:
    """Waits for `Driven.resume`. Its iterator is a tuple's: no frame of ours is entered when the wait is
    over, and by the compiled module none when it begins.
    """

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return iter((None,))  # type: ignore[return-value]  # all that `await` needs


if TYPE_CHECKING:
    Pause = PlainPause
else:
    try:
        from pdserve.router.native._native import Pause
    except ImportError:
        Pause = PlainPause
PAUSE: Final = Pause()


class Driven:
    """One coroutine, and what it waits for."""

    __slots__ = ("_awaited", "_coroutine", "id", "news")
    news: PlainPause
    """To be awaited: done at the next `resume`."""

    def __init__(self) -> None:
        self.id = b""
        """What is logged meanwhile has it."""
        self._coroutine: Coroutine[Any, None, None] | None = None
        self._awaited: asyncio.Future[Any] | None = None
        self.news = PAUSE

    def run(self, coroutine: Coroutine[Any, None, None]) -> None:
        """Begin. The coroutine must catch whatever it raises."""
        self._coroutine = coroutine
        self.name_logs()
        self.resume()

    def name_logs(self) -> None:
        """What is logged from now on, within the callback that runs, has the `id`. Nothing is usually logged
        in those of workers' connections: who does it there calls this before.
        """
        served_request.set(self.id)

    def resume(self) -> None:
        """What `news` waits for is here. Nothing happens where the coroutine is over."""
        coroutine = self._coroutine
        if coroutine is None:
            return
        try:
            awaited = coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            self._coroutine = None
            self.on_end()
            return
        except BaseException:  # a bug: who has resumed it learns of that
            self._coroutine = None
            self.on_end()
            raise
        if awaited is not None:
            self._wait_for(awaited)

    def throw(self, error: BaseException) -> None:
        """Raise this where the coroutine waits. Not from inside it."""
        coroutine = self._coroutine
        if coroutine is None:
            return
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            awaited.remove_done_callback(self._on_done)
        self.name_logs()
        try:
            awaited = coroutine.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._coroutine = None
            self.on_end()
            return
        except BaseException:  # a bug: who has resumed it learns of that
            self._coroutine = None
            self.on_end()
            raise
        if awaited is not None:
            self._wait_for(awaited)

    def on_end(self) -> None:
        """The coroutine is over."""

    def _wait_for(self, awaited: asyncio.Future[Any]) -> None:
        awaited._asyncio_future_blocking = False  # as asyncio.Task does; a future yields only itself
        self._awaited = awaited
        awaited.add_done_callback(self._on_done)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        if future is self._awaited:
            self._awaited = None
            self.name_logs()
            self.resume()


_REST_S: Final = 0.0001


async def pass_on() -> None:
    """Let others have their turns."""
    await asyncio.sleep(_REST_S)


async def in_task(coroutine: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
    """Have a task run what needs one, and wait for it. Raises TimeoutError after `limit_s`. The task is
    cancelled then, and where the wait ends early.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except BaseException:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TimeoutError
    return task.result()
