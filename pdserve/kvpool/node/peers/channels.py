"""Control connections of a node to its peers: one each, opened when needed, shared by callers. asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdserve.errors import PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol.messages import Fault, Hello, Reply, Request, Welcome
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.security.tls import Certificates


@dataclass
class _Link:
    """`idle`: no call has used it since the last `close_idle`."""

    control: AsyncControl | None = None
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: bool = False
    silent: AsyncControl | None = None  # given up because it did not answer
    users: int = 0


class PeerControls:
    """Connections by address. A peer that does not answer costs its caller the time-out, and no other
    caller.
    """

    def __init__(self, hello: Hello, certificates: Certificates) -> None:
        self.on_upgrading: Callable[[str], None] = lambda node: None  # a peer says that it will be back
        self._hello = hello
        self._certificates = certificates
        self._links: dict[str, _Link] = {}
        self._closed = False

    async def call(
        self, address: str, make: Callable[[int], Request], timeout_s: float, *, node: str = ""
    ) -> tuple[Reply, Welcome]:
        """The reply to `make(id)`, and the peer's Welcome. `node`: the name that the peer must have, if any.

        Raises PoolTimeout (no answer in time), PoolUnavailable (nobody listens, or it hung up), PoolRefused
        (it takes no connection of ours, or is another node), FrameError, ConfigError (a malformed address).
        After a time-out the next call makes a new connection.
        """
        if self._closed:
            raise PoolRefused("the node stops")
        link = self._links.setdefault(address, _Link())
        link.idle = False
        link.users += 1
        control = None
        try:
            async with asyncio.timeout(timeout_s):
                control = await self._open(link, address)
                if node and control.welcome.node != node:
                    raise PoolRefused(f"at {address} is node {control.welcome.node}, not {node}")
                return await control.call(make), control.welcome
        except TimeoutError:
            link.silent = control
            self._drop(link, control)
            raise PoolTimeout(f"pool node {address} did not answer within {timeout_s} s") from None
        except PoolUnavailable as error:
            if control is not None and link.silent is control:  # another caller's time was over
                raise PoolTimeout(f"pool node {address} did not answer") from error
            raise
        except PoolRefused:
            self._drop(link, control)
            raise
        finally:
            link.users -= 1

    def close_idle(self) -> None:
        """Close the connections that were not used since the last call of this."""
        for address, link in list(self._links.items()):
            if link.idle and not link.users:
                self._drop(link, link.control)
                del self._links[address]
            link.idle = True

    def close(self) -> None:
        """Close all; idempotent."""
        self._closed = True
        for link in self._links.values():
            self._drop(link, link.control)
        self._links.clear()

    async def _open(self, link: _Link, address: str) -> AsyncControl:
        async with link.connecting:
            if link.control is None or link.control.broken:
                self._drop(link, link.control)
                control = await AsyncControl.connect(
                    address, self._hello, tls=self._certificates.client_context
                )
                if self._closed:
                    control.close()
                    raise PoolRefused("the node stops")
                control.on_fault = partial(self._hung_up, control.welcome.node)
                link.control = control
            return link.control

    def _hung_up(self, node: str, fault: Fault) -> None:
        if fault.code == "upgrading":
            self.on_upgrading(node)

    def _drop(self, link: _Link, control: AsyncControl | None) -> None:
        if control is not None:
            control.close()
            if link.control is control:
                link.control = None
