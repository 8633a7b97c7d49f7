"""A follower of a group of ranks: what its leader said, and the leader's host pool to copy from.

A copy is taken without asking the leader, whose rank may fill the page anew at any moment. So the checksum is
that of the copy, made after it: the bytes are the page's, or the copy is dropped. It is the checksum that the
page's writer made, or a 64-bit one as strong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

import numpy as np

from pdserve.errors import PageMismatch
from pdserve.kvpool.client.operations import Proof
from pdserve.kvpool.hicache.ranks.host_pages import MappedHostPages
from pdserve.kvpool.hicache.ranks.messages import Begun, Ended, News, Place
from pdserve.kvpool.native import copying
from pdserve.kvpool.protocol.page_bytes import PageBuffers

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 0.1
"""Ranks begin a read within some milliseconds of each other: they have just agreed on it."""
PAUSE_S: Final = 1.0
"""After a wait in vain only what the leader has already read is copied, for this long."""
WAITING_SHARE: Final = 0.5
KEEP_S: Final = 10.0
"""All ranks read a page at about the same time. Later its place has probably been given away."""
MAX_PAGES: Final = 65_536


class State(Enum):
    """Of a page that lies nowhere yet."""

    UNKNOWN = "the leader has not begun to read it"
    READING = "the leader reads it"
    MISSED = "the leader has not got it"


Known: TypeAlias = Place | State


class Board:
    """The newest news of each page, for a while."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._known: dict[bytes, tuple[Known, float]] = {}  # and when it was said; the oldest first

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, news: News, now_s: float) -> None:
        """The leader said this."""
        match news:
            case Begun(keys):
                for key in keys:
                    self._put(key, State.READING, now_s)
            case Ended(keys, places):
                for key, place in zip(keys, places, strict=True):
                    self._put(key, place if place is not None else State.MISSED, now_s)
        while self._known:
            oldest = next(iter(self._known))
            if len(self._known) <= self._max_pages and self._known[oldest][1] > now_s - KEEP_S:
                break
            del self._known[oldest]

    def look(self, key: bytes, now_s: float) -> Known:
        """What is known of a page."""
        known, said_s = self._known.get(key, (State.UNKNOWN, now_s))
        return known if said_s > now_s - KEEP_S else State.UNKNOWN

    def _put(self, key: bytes, known: Known, now_s: float) -> None:
        self._known.pop(key, None)
        self._known[key] = known, now_s


_OPEN: Final = (State.UNKNOWN, State.READING)


@dataclass(frozen=True)
class Leader:
    """What one leader said, and its memory by part."""

    board: Board
    memory: Mapping[str, MappedHostPages]


class Follower:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leader: Leader | None = None
        self._paused_until_s = 0.0

    def follow(self, memory: Mapping[str, MappedHostPages]) -> None:
        """There is a leader, with this memory."""
        with self._changed:
            self._leader = Leader(Board(), memory)

    def hear(self, news: News) -> None:
        """The leader said this. Raises ValueError for what makes no sense."""
        with self._changed:
            if self._leader is not None:
                self._leader.board.hear(news, time.monotonic())
            self._changed.notify_all()

    def leave(self) -> None:
        """The leader has ended. Its memory is let go."""
        with self._changed:
            leader, self._leader = self._leader, None
            self._changed.notify_all()
        for memory in leader.memory.values() if leader is not None else ():
            memory.let_go()

    def take(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[Proof | None]:
        """As `SharedReads.take`."""
        now_s = time.monotonic()
        until_s = now_s + (deadline_s - now_s) * WAITING_SHARE
        patient_until_s = min(until_s, now_s + PATIENCE_S)
        proofs: list[Proof | None] = [None] * len(keys)
        left = set(range(len(keys)))
        while left:
            leader, settled = self._wait(keys, left, patient_until_s, until_s)
            if leader is None:
                break
            for i, known in settled.items():
                if isinstance(known, Place):
                    proofs[i] = _copied(leader, known, pages[i])
            left -= settled.keys()
        return proofs

    def _wait(
        self, keys: Sequence[bytes], left: set[int], patient_until_s: float, until_s: float
    ) -> tuple[Leader | None, dict[int, Known]]:
        """Wait until the leader has read some of the pages, or has not got them.

        Returns (None, {}) when there is no leader, or nothing more to wait for.
        """
        with self._changed:
            while (leader := self._leader) is not None:
                now_s = time.monotonic()
                known = {i: leader.board.look(keys[i], now_s) for i in left}
                settled: dict[int, Known] = {i: one for i, one in known.items() if one not in _OPEN}
                if settled:
                    return leader, settled
                limit_s = until_s if State.READING in known.values() else patient_until_s
                if now_s < self._paused_until_s:
                    break
                if now_s >= limit_s:
                    self._paused_until_s = now_s + PAUSE_S
                    break
                self._changed.wait(limit_s - now_s)
        return None, {}


def _copied(leader: Leader, place: Place, page: PageBuffers) -> Proof | None:
    """Copy a page of the leader. None: its place holds other bytes by now, or it is no page like ours."""
    try:
        source = leader.memory[place.part].page(place.page)
    except (KeyError, PageMismatch) as error:
        logger.warning("the leader of this host's ranks named a page that it has not: %s", error)
        return None
    if [one.size for one in source] != [one.size for one in page]:
        return None
    trailer = np.frombuffer(place.trailer, np.uint8)
    checksum = copying.copy([*page, np.empty_like(trailer)], [*source, trailer])
    return Proof(place.checksum, place.trailer) if checksum == place.checksum else None
