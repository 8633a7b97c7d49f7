"""Asking one node by its own address, past relays and rings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, TypeVar

import numpy as np

from pdserve.errors import PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ListPages, PageList
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.shm import host_id
from tests.chaos.field import ADMIN_TOKEN
from tests.chaos.worker import GEOMETRY, NAMESPACE
from tests.support.kvpool.node_processes import NodeProcess

R = TypeVar("R", bound=m.Reply)

ASK_TIMEOUT_S: Final = 2.0
POLL_S: Final = 0.05
LIST_PAGES: Final = 1024  # at a time


class Direct:
    """A client of one node that maps its memory and sees requests and answers as they are. Everything raises
    PoolError.
    """

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        hello = make_hello("chaos-direct", host_id(), "shm", ADMIN_TOKEN)
        self._channel = ControlChannel.connect(node.address, hello, time.monotonic() + ASK_TIMEOUT_S)
        self._last_id = 0
        try:
            opened = self.ask(lambda request_id: m.OpenNamespace(request_id, NAMESPACE, GEOMETRY))
            if not isinstance(opened, m.Opened):
                raise PoolRefused(f"{node.name}: {opened}")
        except BaseException:
            self._channel.close()
            raise
        self.namespace = opened.namespace

    def ask(self, make: Callable[[int], m.Request]) -> m.Reply:
        self._last_id += 1
        return self._channel.call(make(self._last_id), time.monotonic() + ASK_TIMEOUT_S)

    def get(self, keys: Sequence[bytes], segment_bytes: Sequence[int]) -> list[m.Pin]:
        """Those with status HIT are to be released."""
        got = self.ask(lambda request_id: m.Get(request_id, self.namespace, list(keys), list(segment_bytes)))
        if not isinstance(got, m.Got):
            raise PoolRefused(f"{self.node.name}: {got}")
        return got.pins

    def release(self, pins: Sequence[m.Pin]) -> None:
        hits = [pin for pin in pins if pin.status == m.HIT]
        self._channel.post(m.Release([pin.slot for pin in hits], [pin.sequence for pin in hits]))

    def bytes_of(self, pin: m.Pin, size_bytes: int) -> Bytes1D:
        """What lies there now, copied."""
        memory = np.memmap(self.node.arena_path, dtype=np.uint8, mode="r")
        return np.array(memory[pin.offset : pin.offset + size_bytes])

    def __enter__(self) -> Direct:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def ask(
    node: NodeProcess, make: Callable[[int], m.Request], kind: type[R], timeout_s: float = ASK_TIMEOUT_S
) -> R:
    """One request of the administrator's. Raises PoolError."""
    with NodeClient(node.address, ADMIN_TOKEN, timeout_s) as asked:
        return asked.ask(make, kind)


def pages_on(node: NodeProcess) -> dict[bytes, int]:
    """Keys and lengths of the pages of the workers' namespace there, in memory or on its disk. Raises
    PoolError.
    """
    found: dict[bytes, int] = {}
    cursor = 0
    with NodeClient(node.address, ADMIN_TOKEN, ASK_TIMEOUT_S) as asked:
        while True:
            listed = asked.ask(
                lambda request_id, at=cursor: ListPages(request_id, NAMESPACE, at, LIST_PAGES),  # type: ignore[misc]
                PageList,
            )
            found |= {page.key: page.length_bytes for page in listed.pages}
            cursor = listed.cursor
            if not cursor:
                return found


def pages_anywhere(nodes: Sequence[NodeProcess]) -> set[bytes]:
    """Raises PoolUnavailable, PoolTimeout: another fault has one of the nodes, and nobody can tell what
    moves.
    """
    return set().union(*map(pages_on, nodes))


AWAY: Final = (PoolUnavailable, PoolTimeout)
"""What a node that another fault has just now answers with."""
