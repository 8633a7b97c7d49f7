"""Which pages each session's requests have made at this worker, so that all of them can be erased.

A router names the session and the number of the turn in a header (`x-pdserve-session`). A request's session
is busy from its start, and once it is answered the digests of its pages are added. A page's digest says all
of the pages before it: of a chain only what lies behind the last known digest is new.

Bounds: MAX_BYTES of digests, and MAX_SESSIONS, since a session of short prompts has no digest. The session
without a request for the longest time is forgotten first. So a worker says of a session from which turn on it
knows all pages, and whoever asks knows whether that is early enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import PageNames, RequestPages

MAX_BYTES: Final = 64 << 20
"""The digests of two million pages."""
MAX_SESSIONS: Final = 32_768
DIGEST_BYTES: Final = 32
NAMED_AT_ONCE_BYTES: Final = 1024 * DIGEST_BYTES
"""2 ms with eight ranks. More is left to a thread."""
ABORTED_S: Final = 2.0
"""For the scheduler, to end what it computes; so often it is looked whether it has."""
LOOKS: Final = 20


@dataclass
class _Session:
    first_turn: int
    is_whole: bool = True
    """Pages of no turn since the first one are unknown."""
    tenant: str = ""
    digests: bytearray = field(default_factory=bytearray)
    records: bytearray = field(default_factory=bytearray)
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Known:
    """What a worker knows of a session. `keys`: of all its pages, and of the recorded tokens of its answers.
    `turn`: from this one on none is missing; 0: some may be.
    """

    keys: list[bytes]
    tenant: str
    turn: int
    is_idle: bool


NOTHING: Final = Known([], "", 0, is_idle=True)


class SessionPages:
    """Lives in the worker's event loop."""

    def __init__(self, names: PageNames, max_bytes: int = MAX_BYTES) -> None:
        self._names = names
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, request: HttpRequest) -> None:
        """The request has come. `end` follows in any case."""
        if not request.session:
            return
        session = self._sessions.get(request.session)
        if session is None:
            session = self._sessions[request.session] = _Session(request.turn)
        self._sessions.move_to_end(request.session)
        session.first_turn = min(session.first_turn, request.turn)
        session.running += 1
        session.idle.clear()

    def end(self, request: HttpRequest, pages: RequestPages | None) -> None:
        """Nothing of the request is stored any more. `pages`: all that it may have stored; None: unknown."""
        session = self._sessions.get(request.session)
        if session is None:
            return
        if pages is None:
            session.is_whole = False
        else:
            self._add(session, request, pages)
        session.running -= 1
        if not session.running:
            session.idle.set()
        while self._bytes > self._max_bytes or len(self._sessions) > MAX_SESSIONS:
            oldest = next((name for name, one in self._sessions.items() if not one.running), "")
            if not oldest:
                break
            gone = self._sessions.pop(oldest)
            self._bytes -= len(gone.digests) + len(gone.records)

    def _add(self, session: _Session, request: HttpRequest, pages: RequestPages) -> None:
        before = len(session.digests) + len(session.records)
        session.tenant = pages.tenant
        for chain in pages.chains.values():
            first = bisect_left(chain, True, key=lambda digest: digest not in session.digests)
            session.digests += b"".join(chain[first:])
        session.records += b"".join(key for key in request.record_keys if key not in session.records)
        self._bytes += len(session.digests) + len(session.records) - before

    async def known(self, name: str, timeout_s: float) -> Known:
        """What is known of the session, once none of its requests runs, or after `timeout_s`."""
        session = self._sessions.get(name)
        if session is None:
            return NOTHING
        if session.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.idle.wait(), timeout_s)
        if len(session.digests) <= NAMED_AT_ONCE_BYTES:
            return self._known(session)
        return await asyncio.to_thread(self._known, session)

    def _known(self, session: _Session) -> Known:
        pages = RequestPages(self._names, {"": _cut(session.digests)}, session.tenant)
        keys = pages.all_keys() + _cut(session.records)
        turn = session.first_turn if session.is_whole else 0
        return Known(keys, session.tenant, turn, is_idle=not session.running)


async def are_named(request: HttpRequest) -> bool:
    """Whether the tokens of an answered request are known to the last: pages of some models' media are named
    by the scheduler alone, and an aborted request has its last tokens a moment later.
    """
    made = [one for one in request.requests.values() if one.was_sent]
    if any(one.input_ids is None for one in made):
        return False
    for _ in range(LOOKS):
        if all(one.is_finished for one in made):
            return True
        await asyncio.sleep(ABORTED_S / LOOKS)
    return False


def _cut(joined: bytearray) -> list[bytes]:
    return [bytes(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES)]
