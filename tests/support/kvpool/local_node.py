"""A real node in a thread of this process: its sockets and memory are real, its start takes milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.connectors import connect
from tests.support.waiting import SOON_S


class NodeLog(logging.FileHandler):
    """What the nodes of this process log. They share one logger, and may end in any order."""


class LocalNode:
    """Used like a ProcessPool. `kill` ends the node as a bug does: its pages stay for the next start."""

    node: PoolNode

    def __init__(self, config: PoolNodeConfig, directory: Path) -> None:
        self.address = f"unix:{directory}/{config.name}.sock"
        self.config = replace(config, listen=[self.address], keep=False)
        self._log_path = directory / f"{config.name}.log"
        self._handler = NodeLog(self._log_path)
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        self._logger = logging.getLogger("pdserve")
        self._logger.addHandler(self._handler)
        self._logger.setLevel(logging.INFO)
        self.restart()

    def restart(self, **options: Any) -> None:
        self.config = replace(self.config, **options)
        self.node = PoolNode(self.config)
        ready, self._error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(SOON_S)
        if self._error is not None:
            raise self._error

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self.node.serve(ready.set)

        try:
            asyncio.run(serve())
        except NodeFailed:
            pass
        except PdserveError as error:
            self._error = error
        ready.set()

    def run(self, work: Callable[[], Any]) -> Any:
        """Call in the thread of its loop."""

        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(SOON_S)

    def log(self) -> str:
        return self._log_path.read_text()

    def connect(self, *, timeout_s: float = SOON_S) -> Connection:
        return connect(self.address, time.monotonic() + timeout_s)

    @property
    def arena_path(self) -> Path:
        return self.config.arena_dir / self.config.name / "arena"

    def kill(self) -> None:
        self._end(self.node.fail, NodeFailed("killed"))

    def close(self) -> None:
        """Stop it as an operator would; nothing is left."""
        self._end(self.node.stop)
        self._logger.removeHandler(self._handler)
        if not any(isinstance(handler, NodeLog) for handler in self._logger.handlers):
            self._logger.setLevel(logging.NOTSET)
        self._handler.close()

    def _end(self, how: Any, *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
            self._loop.call_soon_threadsafe(how, *given)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
