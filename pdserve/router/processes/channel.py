"""Messages between a router's parent process and its children.

The messages between a router's parent process and its children.

Messages over a socket pair between parent and child: four bytes of length, then MessagePack.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from pdserve.errors import PdserveError
from pdserve.router.fleet.changes import FleetChange
from pdserve.router.metrics.stats import Snapshot


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The child serves."""


class Collect(msgspec.Struct, tag="collect", frozen=True):
    """Asks a child for its metrics, or the parent for those of all children."""

    number: int


class Collected(msgspec.Struct, tag="collected", frozen=True):
    """The answer to `Collect`."""

    number: int
    metrics: Snapshot


class Last(msgspec.Struct, tag="last", frozen=True):
    """The child's metrics as it ends."""

    metrics: Snapshot


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Read the API keys again: the admin API of one child was asked to."""


class Stopping(msgspec.Struct, tag="stopping", frozen=True):
    """The router is about to stop: `/ready` is to say so, while requests are still served."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Ids of all workers that the child refuses. A child that starts refuses the same."""

    workers: frozenset[str]


class LimitsTold(msgspec.Struct, tag="limits", frozen=True):
    """What a process tells all others of tenants' limits (`agreement`). The parent passes it on to all, its
    sender too, in one order.
    """

    data: bytes


FromChild = Ready | Collect | Last | FleetChange | Refused | Reload | LimitsTold
FromParent = Collect | FleetChange | Reload | LimitsTold | Stopping


COLLECT_TIMEOUT_S = 1.0
"""For a child's answer to its parent."""
SUM_TIMEOUT_S = 5.0
"""For the parent's answer to a child: the parent has all children's by then, and has added them up."""
CLOSE_TIMEOUT_S = 1.0
_LENGTH_BYTES = 4
_encoder = Encoder()
FROM_CHILD: Final[Decoder[FromChild | Collected]] = Decoder(FromChild | Collected)
FROM_PARENT: Final[Decoder[FromParent | Collected]] = Decoder(FromParent | Collected)
Incoming = TypeVar("Incoming")


class ChannelClosed(PdserveError):
    """The process at the other end is gone, or does not answer."""


class Channel(Generic[Incoming]):
    """One end; `decoder` is `FROM_CHILD` or `FROM_PARENT`. Answers to `collect` do not go to `on_message`."""

    def __init__(
        self, decoder: Decoder[Incoming | Collected], on_message: Callable[[Incoming], None]
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Snapshot]] = {}
        self._is_over = False

    async def run(self, sock: socket.socket) -> None:
        """Take in messages until the other end is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock)
        self._writer.writelines(self._unsent)
        self._unsent.clear()
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
                self._take_in(self._decoder.decode(await reader.readexactly(size)))
        except (OSError, asyncio.IncompleteReadError):  # the other end is gone
            pass
        finally:
            self._is_over = True
            self._writer.close()
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ChannelClosed("the process is gone"))

    def _take_in(self, message: Incoming | Collected) -> None:
        if not isinstance(message, Collected):
            self._on_message(message)
        elif (asked := self._asked.pop(message.number, None)) is not None and not asked.done():
            asked.set_result(message.metrics)

    def send(self, message: FromChild | FromParent | Collected) -> None:
        """Send, unless the other end is gone. The other end reads at once, so nothing piles up."""
        body = _encoder.encode(message)
        data = len(body).to_bytes(_LENGTH_BYTES) + body
        if self._writer is None:
            self._unsent.append(data)
        elif not self._writer.is_closing():
            self._writer.write(data)

    async def collect(self, timeout_s: float) -> Snapshot:
        """Metrics from the other end. Raises ChannelClosed."""
        if self._is_over:
            raise ChannelClosed("the process is gone")
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(Collect(number))
        try:
            return await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise ChannelClosed("no answer in time") from None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """Hang up once all is sent."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._writer.wait_closed()
