"""The page mover itself: answers the calls of one scheduler process with a `PoolClient` of its own.

One thread for each lane. The main thread watches the scheduler: the mover ends with it, at once, in the
middle of a batch too. The pool node then takes back what was reserved or held.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from pdserve.errors import PdserveError, PoolError, PoolRefused
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.chain_client import ChainClient
from pdserve.kvpool.mover.host_pages import MappedHostPages
from pdserve.kvpool.mover.lane import Lane
from pdserve.kvpool.mover.messages import (
    VERSION,
    Answer,
    Call,
    Check,
    Checked,
    Clear,
    Done,
    Exists,
    Failed,
    Move,
    Start,
    Started,
    decode_call,
    decode_start,
    encode,
)
from pdserve.kvpool.mover.ranks.group import PartReads, RankGroup
from pdserve.logs import configure_logs
from pdserve.security.tokens import decode_secret

logger = logging.getLogger(__name__)

SWITCH_S: Final = 0.0005
"""The mover's own threads hand the interpreter over after this time: they hold it for single steps only."""
PARENT_CHECK_S: Final = 1.0


class Mover:
    """The calls, over one client and the shared memory of each part."""

    def __init__(self, chains: ChainClient, hosts: Mapping[str, MappedHostPages]) -> None:
        self._chains = chains
        self._hosts = hosts

    def serve(self, lane: Lane) -> None:
        """Answer the calls of a lane until the scheduler closes it."""
        try:
            while True:
                answer = self._answer(decode_call(lane.receive()))
                lane.send(encode(answer, lane.number))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.debug("a lane of the page mover ended: %s", error)
        finally:
            lane.close()

    def _answer(self, call: Call) -> Answer:
        try:
            return self._do(call)
        except Exception as error:  # boundary: a bug costs this batch, and not the lane
            logger.exception("the page mover failed (a bug; treated as a miss)")
            return Failed(f"{type(error).__name__}: {error}")

    def _do(self, call: Call) -> Answer:
        chains = self._chains
        match call:
            case Exists(keys, parts):
                present = chains.present(keys, parts)
                return Done(0, b"".join(map(bytes, present)))
            case Move(write, part, keys, indices):
                pages = self._hosts[part].buffers(indices)
                moved = chains.put(keys, pages, part) if write else chains.get(keys, pages, part)
                return Done(moved.written, bytes(moved.done))
            case Clear():
                return Done(chains.clear())
            case Check():
                return _checked(chains.check())


def _checked(outcome: dict[str, PoolError | None]) -> Checked:
    errors = {node: str(error) if error is not None else "" for node, error in outcome.items()}
    return Checked(errors, [node for node, error in outcome.items() if isinstance(error, PoolRefused)])


def main(descriptor: int) -> int:
    """Run the mover. `descriptor`: the socket on which the scheduler says what to work with."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the scheduler, which the mover outlives
        signal.signal(number, signal.SIG_IGN)
    configure_logs("text", "info", text_format="[%(asctime)s page mover] %(message)s")
    sys.setswitchinterval(SWITCH_S)
    parent = os.getppid()
    life = Lane(socket.socket(fileno=descriptor))
    try:
        start = decode_start(life.receive())
        if start.version != VERSION:
            raise PoolRefused("pdserve was upgraded on disk since this worker started: restart the worker")
        _begin(start)
    except (PdserveError, OSError, ValueError, msgspec.MsgspecError) as error:
        life.send(encode(Failed(str(error))))
        return 1
    life.send(encode(Started()))
    _watch(life.socket, parent)
    os._exit(0)  # in the middle of what the lanes do: nobody wants it any more


def _begin(start: Start) -> None:
    config = msgspec.convert(start.pool, PoolClientConfig, dec_hook=decode_secret)
    parts = start.parts
    largest = max(part.pages.page_bytes // len(part.suffixes) for part in parts.values())
    suffixes = {name: part.suffixes for name, part in parts.items()}
    hosts = {name: MappedHostPages(part.pages) for name, part in parts.items()}
    client = PoolClient(config, start.namespace, start.geometry, name=start.name, page_bytes=largest)
    shares = _join(start, hosts) if start.ranks else {}
    chains = ChainClient(client, suffixes, shares)
    mover = Mover(chains, hosts)
    for fd in start.lanes:
        lane = Lane(socket.socket(fileno=fd))
        threading.Thread(target=mover.serve, args=(lane,), name=f"lane-{fd}", daemon=True).start()


def _join(start: Start, hosts: Mapping[str, MappedHostPages]) -> dict[str, PartReads]:
    """The reads of the parts that all ranks of this host share."""
    shared = {name: part.pages for name, part in start.parts.items() if part.is_replicated}
    group = RankGroup(start.ranks, shared, hosts)
    group.start()
    return {name: group.part(name) for name in shared}


def _watch(life: socket.socket, parent: int) -> None:
    """Return when the scheduler has ended: it closes the socket, also when it is killed."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(PARENT_CHECK_S * 1000):
            return
