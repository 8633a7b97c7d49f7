"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol
from urllib.parse import unquote

from uvicorn.server import ServerState

from pdserve.logs import ThrottledLog
from pdserve.router.server.asgi import Application, Asgi
from pdserve.router.server.request_cycle import RequestCycle
from pdserve.security.connection_limits import ConnectionLimit

logger = logging.getLogger(__name__)


class Connected(Protocol):
    """A connection, as the connection limit sees it."""

    transport: asyncio.Transport

    @property
    def is_answering(self) -> bool:
        """It must not go now."""
        ...


class DirectHandler(Protocol):
    """Serves some paths past ASGI."""

    @property
    def targets(self) -> Mapping[bytes, str]:
        """Path by request target, as nearly all clients write it."""
        ...

    def find(self, path: str) -> str | None:
        """The path that is meant by a target's `path`, of another spelling. None: not of this handler."""
        ...

    async def serve(self, client: RequestCycle) -> None:
        """Answer one request."""
        ...


async def _nobody(client: RequestCycle) -> None:
    raise AssertionError("no target is served directly")


class Connections(ServerState):
    """uvicorn's state of a server, the limits, and who serves the requests."""

    def __init__(
        self,
        application: Asgi,
        direct: DirectHandler | None = None,
        *,
        keep_alive_s: float,
        head_s: float,
        client_read_s: float,
        most: float = math.inf,
    ) -> None:
        """`direct` gets the requests for its targets, the application all others. `most` connections: beyond
        it, those are closed that wait for no answer.
        """
        super().__init__()
        self.application: Final = Application(application)
        self.targets: Final[Mapping[bytes, str]] = {} if direct is None else direct.targets
        self.serve_directly: Final[Callable[[RequestCycle], Coroutine[Any, Any, None]]] = (
            _nobody if direct is None else direct.serve
        )
        self._direct = direct
        self.keep_alive_s: Final = keep_alive_s
        self.head_s: Final = head_s
        self.client_read_s: Final = client_read_s
        self.is_stopping = False
        self.log: Final = ThrottledLog(logger)
        self.connection_limit: Final[ConnectionLimit[Connected]] = ConnectionLimit(most)
        """All connections."""
        self._default_lines = b""
        self._lined = self.default_headers

    def find(self, path: bytes | None) -> str | None:
        """The path that `serve_directly` gets for a target with this one; None: the application's."""
        if self._direct is None or path is None:
            return None
        return self._direct.find(unquote(path.decode("ascii")))

    @property
    def default_lines(self) -> bytes:
        """`default_headers` as they stand in a head. uvicorn makes a new list of them each second."""
        if self._lined is not self.default_headers:
            self._lined = self.default_headers
            self._default_lines = b"".join(b"%b: %b\r\n" % pair for pair in self._lined)
        return self._default_lines
