"""An event loop whose clock stands still while something is to be done, and jumps to the next timer then.

Tests of deadlines take no time on it, and nothing depends on how fast the machine is. For code without
threads and without other processes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left to be done: the test would hang")
        if not ready and timeout:
            self.loop.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The asynchronous test as one that pytest runs, in virtual time."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        run_virtually(test(*arguments, **named))

    return run
