"""What the connections of one server share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol
from urllib.parse import unquote

from uvicorn.server import ServerState

from pdserve.logs import ThrottledLog
from pdserve.security.connection_limits import ConnectionLimit

logger = logging.getLogger(__name__)


class Proxied(Protocol):
    """Makes and serves the requests for some paths."""

    @property
    def targets(self) -> Mapping[bytes, str]:
        """Path by request target, as nearly all clients write it."""
        ...

    @property
    def running(self) -> Collection[Any]:
        """The requests that are served now. They have a method `cancel`, as asyncio.Task has it."""
        ...

    def find(self, path: str) -> str | None:
        """The path that is meant by a target's `path`, of another spelling. None: not one of these."""
        ...

    def request(self, connection: Any, method: bytes, target: bytes, path: str, headers: Any) -> Any:
        """A `ClientRequest` for one of the paths; arguments as of its constructor."""
        ...


class Connections(ServerState):
    """uvicorn's state of a server, the limits, and who serves the requests."""

    def __init__(
        self,
        ordinary: Callable[..., Any],
        proxied: Proxied | None = None,
        *,
        keep_alive_s: float,
        head_s: float,
        client_read_s: float,
        most: float = math.inf,
    ) -> None:
        """`ordinary` makes the requests that are not `proxied`, and is called as that. `most` connections:
        beyond it, those are closed that wait for no answer.
        """
        super().__init__()
        self.ordinary: Final = ordinary
        self.targets: Final[Mapping[bytes, str]] = {} if proxied is None else proxied.targets
        self.proxied: Final[Callable[..., Any]] = ordinary if proxied is None else proxied.request
        self._proxied = proxied
        self.keep_alive_s: Final = keep_alive_s
        self.head_s: Final = head_s
        self.client_read_s: Final = client_read_s
        self.is_stopping = False
        self.log: Final = ThrottledLog(logger)
        self.connection_limit: Final[ConnectionLimit[Any]] = ConnectionLimit(most)
        """All connections."""
        self.running: Final[set[Any]] = set()
        """The tasks of requests that are not `proxied`."""
        self.ids: Final[list[bytes]] = []
        """For requests that bring none."""
        self.default_lines = b""
        """Header lines of every answer, renewed each second."""

    @property
    def tasks(self) -> set[Any]:
        """The requests that are served now: a graceful stop waits for them, and cancels them in the end."""
        return {*self.running, *(() if self._proxied is None else self._proxied.running)}

    @tasks.setter
    def tasks(self, tasks: set[Any]) -> None:
        """uvicorn's own set is not used."""

    def find(self, path: bytes | None) -> str | None:
        """The path that is meant by a target's `path`, of another spelling. None: an ordinary one."""
        if self._proxied is None or path is None:
            return None
        return self._proxied.find(unquote(path.decode("ascii")))
