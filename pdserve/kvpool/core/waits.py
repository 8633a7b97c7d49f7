"""Clients that wait for pages to be committed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pdserve.kvpool.core.events import Action, Answer
from pdserve.kvpool.core.sessions import Session, Waiter
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import Fault, Present, Wait

MAX_WAIT_S = 600.0  # longer waits end then
PEER_SHARE = 16  # times the waits of a client that another node may have open
CONNECTIONS_AT_MOST = 4
"""All connections together may wait for this many times the keys of one."""


class Waits:
    """Open waits by key. A wait is answered once: when no page is missing, or at its deadline. Waits and
    their keys are bounded per connection, keys for the node too. `in_tier(namespace, key)` says whether a
    tier has the page.
    """

    def __init__(
        self,
        store: PageStore,
        max_per_session: int,
        max_keys_per_session: int,
        in_tier: Callable[[int, bytes], bool],
        may_read: Callable[[Session, int], bool],
    ) -> None:
        """`may_read(session, namespace)`: whether the client may still read. Tokens change meanwhile."""
        self._store = store
        self._in_tier = in_tier
        self._may_read = may_read
        self._max_per_session = max_per_session
        self._max_keys_per_session = max_keys_per_session
        self._keys = 0
        self._by_key: dict[tuple[int, bytes], list[Waiter]] = {}
        self.open = 0

    def begin(self, session: Session, request: Wait, now_s: float, out: list[Action]) -> Collection[bytes]:
        """Begin a wait, and return the keys that it waits for. Answer at once when all keys are committed, or
        the timeout is 0.
        """
        mask = self._mask(request, now_s)
        missing = {key for key, found in zip(request.keys, mask, strict=True) if not found}
        timeout_s = min(request.timeout_s, MAX_WAIT_S)
        if not missing or not timeout_s > 0:  # NaN included
            out.append(Answer(session.connection, Present(request.id, mask)))
            return ()
        if refusal := self._refusal(session, request):
            out.append(Answer(session.connection, Fault(request.id, "too_many_waiters", refusal)))
            return ()
        waiter = Waiter(
            session.connection, request.id, request.namespace, request.keys, missing, now_s + timeout_s
        )
        session.waiters[request.id] = waiter
        session.waited_keys += len(request.keys)
        self._keys += len(request.keys)
        self.open += 1
        for key in missing:
            self._by_key.setdefault((request.namespace, key), []).append(waiter)
        return missing

    def _refusal(self, session: Session, request: Wait) -> str:
        """Why no further wait may be opened; empty if one may."""
        waits, keys, most = len(session.waiters), len(request.keys), self._max_keys_per_session
        at_most = self._max_per_session
        if session.peer:  # it asks for all its clients, which are bounded there
            most, at_most = most * CONNECTIONS_AT_MOST, at_most * PEER_SHARE
        if waits >= at_most or request.id in session.waiters:
            return f"{waits} waits are open on this connection, at most {at_most}"
        if session.waited_keys + keys > most:
            return f"{session.waited_keys} keys are waited for on this connection, at most {most}"
        if self._keys + keys > most * CONNECTIONS_AT_MOST:
            return f"{self._keys} keys are waited for at this node, at most {most * CONNECTIONS_AT_MOST}"
        return ""

    def committed(
        self, namespace: int, key: bytes, sessions: dict[int, Session], now_s: float, out: list[Action]
    ) -> None:
        """A page is readable: answer the waits for which it was the last missing page."""
        for waiter in self._by_key.pop((namespace, key), ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                self.answer(sessions[waiter.connection], waiter, now_s, out)

    def seen(
        self,
        namespace: int,
        keys: Sequence[bytes],
        sessions: dict[int, Session],
        now_s: float,
        out: list[Action],
    ) -> None:
        """Another node has these pages: for those who wait they are there."""
        for key in keys:
            for waiter in self._by_key.get((namespace, key), ()):
                waiter.elsewhere.add(key)
            self.committed(namespace, key, sessions, now_s, out)

    def answer(self, session: Session, waiter: Waiter, now_s: float, out: list[Action]) -> None:
        """End the wait with what is committed now, or with nothing if the client may not read it any more."""
        self._remove(session, waiter)
        may = self._may_read(session, waiter.namespace)
        mask = self._mask(waiter, now_s) if may else bytes(len(waiter.keys))
        out.append(Answer(session.connection, Present(waiter.request_id, mask)))

    def expire(self, session: Session, now_s: float, out: list[Action]) -> None:
        for waiter in [waiter for waiter in session.waiters.values() if waiter.deadline_s <= now_s]:
            self.answer(session, waiter, now_s, out)

    def drop_namespace(self, session: Session, namespace: int, out: list[Action]) -> None:
        """These pages cannot come any more: answer the waits now."""
        for waiter in [waiter for waiter in session.waiters.values() if waiter.namespace == namespace]:
            self._remove(session, waiter)
            out.append(Answer(session.connection, Present(waiter.request_id, bytes(len(waiter.keys)))))

    def disconnected(self, session: Session) -> None:
        for waiter in list(session.waiters.values()):
            self._remove(session, waiter)

    def _remove(self, session: Session, waiter: Waiter) -> None:
        del session.waiters[waiter.request_id]
        session.waited_keys -= len(waiter.keys)
        self._keys -= len(waiter.keys)
        self.open -= 1
        for key in waiter.missing:
            others = self._by_key[waiter.namespace, key]
            others.remove(waiter)
            if not others:
                del self._by_key[waiter.namespace, key]

    def _mask(self, request: Wait | Waiter, now_s: float) -> bytes:
        find = self._store.index.namespace(request.namespace).lookup(now_s)
        namespace = request.namespace
        elsewhere = request.elsewhere if isinstance(request, Waiter) else ()
        return bytes(
            find(key) is not None or key in elsewhere or self._in_tier(namespace, key) for key in request.keys
        )

    def check(self) -> None:
        """Assert that nothing is left behind. For tests."""
        waiters = {id(waiter) for waiters in self._by_key.values() for waiter in waiters}
        assert len(waiters) == self.open
        assert (self._keys == 0) == (self.open == 0)
