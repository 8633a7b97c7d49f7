"""What a follower knows of the pages that its leader reads. Pure: times are arguments."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

from pdserve.kvpool.mover.ranks.messages import Begun, Ended, News, Place

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
