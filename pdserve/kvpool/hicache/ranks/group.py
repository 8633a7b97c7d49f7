"""The group of one rank: its thread leads or follows, as the others' ends make it.

The socket is an abstract Unix one of datagrams in order (SOCK_SEQPACKET): the kernel gives its name to one
process, and takes it back when that ends. Others of the same network namespace may connect or squat the name,
so both ends ask the kernel for the other's user, and go on with their own alone.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from pdserve.errors import PageMismatch
from pdserve.kvpool.client.operations import Proof
from pdserve.kvpool.hicache.ranks import messages as m
from pdserve.kvpool.hicache.ranks.follower import Follower
from pdserve.kvpool.hicache.ranks.host_pages import MappedHostPages
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, PageBuffers
from pdserve.kvpool.transports.dial import peer_uid

logger = logging.getLogger(__name__)

REJOIN_S: Final = 0.2
GREETING_TIMEOUT_S: Final = 2.0
MAX_FOLLOWERS: Final = 64


class RankGroup:
    """`hosts`: the shared parts of this rank's host pools, and `mapped` the same in this process."""

    def __init__(self, name: str, shared: Mapping[str, MappedHostPages]) -> None:
        """`name`: of the group, 90 characters at most."""
        self._address = f"\0pdserve-ranks-{name}"
        self._shared = shared
        self._follower = Follower()
        self._lock = threading.Lock()  # guards the attributes below
        self._followers: list[socket.socket] = []
        self._socket: socket.socket | None = None  # the thread waits there
        self._closed = threading.Event()

    def start(self) -> None:
        """Join, in a thread that ends with `close`."""
        threading.Thread(target=self._run, name="pdserve-ranks", daemon=True).start()

    def close(self) -> None:
        """Leave. Idempotent. Reads in progress end without the others."""
        self._closed.set()
        with self._lock:
            while self._followers:
                self._followers.pop().close()
            if self._socket is not None:
                with suppress(OSError):  # it is not connected yet
                    self._socket.shutdown(socket.SHUT_RDWR)

    def part(self, name: str) -> PartReads | None:
        """The reads of one part; None: it is not shared."""
        return PartReads(self, name) if name in self._shared else None

    def take(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[Proof | None]:
        """As `SharedReads.take`. The leader takes nothing."""
        return self._follower.take(keys, pages, deadline_s)

    def begin(self, keys: Sequence[bytes]) -> None:
        """As `SharedReads.begin`. A follower tells nobody."""
        if self._followers:
            for at in range(0, len(keys), m.MAX_KEYS):
                self._tell(m.Begun(list(keys[at : at + m.MAX_KEYS])))

    def end(
        self,
        part: str,
        keys: Sequence[bytes],
        pages: Sequence[PageBuffers],
        proofs: Sequence[Proof | None],
    ) -> None:
        """As `SharedReads.end`."""
        if not self._followers:
            return
        mapped = self._shared[part]
        places = [
            m.Place(part, mapped.number(page), proof.checksum, proof.trailer)
            if proof is not None and proof.checksum != NO_CHECKSUM
            else None
            for page, proof in zip(pages, proofs, strict=True)
        ]
        for at in range(0, len(keys), m.MAX_KEYS):
            end = at + m.MAX_KEYS
            self._tell(m.Ended(list(keys[at:end]), places[at:end]))

    # -- the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with (
                    closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as sock,
                    self._waiting(sock),
                ):
                    if _bound(sock, self._address):
                        self._lead(sock)
                    else:
                        self._follow(sock)
            except (OSError, ValueError, PageMismatch, msgspec.MsgspecError) as error:
                logger.debug("ranks of this host: %s", error)
            self._closed.wait(REJOIN_S)

    @contextmanager
    def _waiting(self, sock: socket.socket) -> Iterator[None]:
        """`close` ends the waits at this socket."""
        with self._lock:
            self._socket = sock
        try:
            yield
        finally:
            with self._lock:
                self._socket = None

    def _lead(self, door: socket.socket) -> None:
        door.listen(MAX_FOLLOWERS)
        logger.info("leads the reads of this host's ranks")
        fds: list[int] = []
        parts = {}
        for name, host in ((name, mapped.host) for name, mapped in self._shared.items()):
            parts[name] = replace(
                host, memory=[(len(fds) + place, size) for place, (_, size) in enumerate(host.memory)]
            )
            fds += [fd for fd, _ in host.memory]
        welcome = m.encode(m.Welcome(m.VERSION, parts))
        while not self._closed.is_set():
            sock, _ = door.accept()
            try:
                if peer_uid(sock) != os.geteuid() or len(self._followers) >= MAX_FOLLOWERS:
                    sock.close()
                    continue
                with self._lock:  # nothing is told before the welcome
                    socket.send_fds(sock, [welcome], fds, socket.MSG_DONTWAIT)
                    self._followers.append(sock)
            except OSError as error:
                logger.debug("a rank of this host: %s", error)
                sock.close()

    def _tell(self, news: m.News) -> None:
        data = m.encode(news)
        with self._lock:
            for sock in list(self._followers):
                try:
                    sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except OSError as error:  # it has ended, or takes nothing: it finds its socket closed
                    logger.debug("a rank of this host is told no more: %s", error)
                    self._followers.remove(sock)
                    sock.close()

    def _follow(self, sock: socket.socket) -> None:
        """Returns when the leader has ended. Raises OSError, ValueError, PageMismatch, MsgspecError."""
        sock.settimeout(GREETING_TIMEOUT_S)
        sock.connect(self._address)
        if peer_uid(sock) != os.geteuid():
            raise PermissionError("another user has the socket of this host's ranks")
        memory = _received_memory(sock)
        sock.settimeout(None)
        self._follower.follow(memory)
        logger.info("copies pages that another rank of this host has read")
        try:
            while data := sock.recv(m.MAX_BYTES):
                self._follower.hear(m.decode_news(data))
        finally:
            self._follower.leave()


class PartReads:
    """One part of the pages of a group. Implements `SharedReads`."""

    def __init__(self, group: RankGroup, part: str) -> None:
        self._group = group
        self._part = part
        self.take = group.take
        self.begin = group.begin

    def end(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], proofs: Sequence[Proof | None]
    ) -> None:
        """See `SharedReads`."""
        self._group.end(self._part, keys, pages, proofs)


def _bound(sock: socket.socket, address: str) -> bool:
    """Whether the name was free and is this socket's now. Raises OSError."""
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _received_memory(sock: socket.socket) -> dict[str, MappedHostPages]:
    """The leader's memory, mapped for reading. Raises OSError, ValueError, PageMismatch, MsgspecError."""
    data, fds, _, _ = socket.recv_fds(sock, m.MAX_BYTES, m.MAX_REGIONS, socket.MSG_CMSG_CLOEXEC)
    try:
        welcome = m.decode_welcome(data)
        if welcome.version != m.VERSION:
            raise ValueError("the leader of this host's ranks is of another version")
        mapped = {}
        for name, host in welcome.parts.items():
            if any(not 0 <= place < len(fds) for place, _ in host.memory):
                raise ValueError("the leader of this host's ranks gave fewer descriptors than it named")
            memory = [(fds[place], size) for place, size in host.memory]
            mapped[name] = MappedHostPages.map(replace(host, memory=memory))
        return mapped
    finally:
        for fd in fds:
            os.close(fd)
