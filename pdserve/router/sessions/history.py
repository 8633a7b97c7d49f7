"""What a session's last turn said, in hashes, and what of it the next one changed. Pure.

A prompt is found in caches as far as it begins as the one before. A client that changes its tools, the text
of the system or an early message has all behind that computed again, and cannot see why. So the router keeps
a chain of hashes of the last turns of sessions that their clients name, and says what changed:

    tools_changed=TOKENS | system_changed=TOKENS | messages_changed=TOKENS

TOKENS: an estimate of what the last turn's prompt had behind the change. The words are those of Anthropic's
cache diagnostics.

Agents ask other things in between under the same name, like a title for the conversation. So a session has up
to `MAX_THREADS` last turns. A turn is compared with that of which it changes the least, and one that has
nothing of any of them begins another. Bounds: `MAX_MESSAGES` of a turn, at most 24 KB each, and
`MAX_SESSIONS` of a router process; a session is forgotten when the table of sessions forgets it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import xxhash

from pdserve.router.api.request_body import BYTES_PER_TOKEN, UNREADABLE, RequestView
from pdserve.router.sessions.canonical import LINK_BYTES, Chain, canonical, chain_of
from pdserve.router.sessions.keys import SessionKey

MAX_MESSAGES: Final = 1024
MAX_SESSIONS: Final = 2048
MAX_THREADS: Final = 3


class _Diagnostics(msgspec.Struct, gc=False):
    previous_message_id: str | None = None


_diagnostics_decoder: Final = msgspec.json.Decoder(_Diagnostics | None)


def asks_diagnosis(json: msgspec.Raw) -> bool:
    """Anthropic's `{"diagnostics": {"previous_message_id": ID | null}}` of a request: whether the client
    names an answer of which this request goes on.
    """
    try:
        asked = _diagnostics_decoder.decode(json)
    except UNREADABLE:
        return False
    return asked is not None and asked.previous_message_id is not None


class Change(NamedTuple):
    """What a turn changed of the one before."""

    reason: str
    tokens: int
    """Estimated, of the prompt before, from the change on."""

    def words(self) -> bytes:
        """As a header says it."""
        return b"%b=%d" % (self.reason.encode("ascii"), self.tokens)


class Turn(msgspec.Struct, frozen=True, gc=False):
    """What one turn said."""

    tools: int
    tools_bytes: int
    system: int
    system_bytes: int
    messages: Chain


_messages: Final = attrgetter("messages")


def turn_of(view: RequestView, before: Sequence[Turn] = ()) -> Turn:
    """The hashes of a request. `before`: turns that it may go on from, see `chain_of`."""
    known, system = map(_messages, reversed(before)), b""
    messages = chain_of(view.messages or view.input, MAX_MESSAGES, known)
    if view.system or view.instructions:
        system = b"\0".join([canonical(one) for one in (view.system, view.instructions) if one])
    return Turn(
        xxhash.xxh3_64_intdigest(view.tools),
        len(view.tools),
        xxhash.xxh3_64_intdigest(system + messages.head),
        len(system) + messages.head_bytes,
        messages,
    )


def change_of(last: Turn, now: Turn) -> Change | None:
    """What `now` changed of `last`; None: it only goes on. A change of tools is told before others: it may be
    that of the system's text, which names them.
    """
    if last.tools != now.tools:
        lost = sum(last.messages.sizes) + last.tools_bytes
        lost += last.system_bytes if last.system != now.system else 0
        return Change("tools_changed", lost // BYTES_PER_TOKEN)
    if last.system != now.system:
        lost = sum(last.messages.sizes) + last.tools_bytes + last.system_bytes
        return Change("system_changed", lost // BYTES_PER_TOKEN)
    before, after = last.messages, now.messages
    if after.hashes.startswith(before.hashes):
        return None
    alike, most = 0, min(len(before.sizes), len(after.sizes))
    while alike < most:  # a hash says what all before it is: the last equal one is searched
        middle = (alike + most + 1) // 2
        at = slice((middle - 1) * LINK_BYTES, middle * LINK_BYTES)
        if before.hashes[at] == after.hashes[at]:
            alike = middle
        else:
            most = middle - 1
    return Change("messages_changed", sum(before.sizes[alike:]) // BYTES_PER_TOKEN)


def is_other(last: Turn, now: Turn) -> bool:
    """The turn has nothing of the other."""
    is_alike = last.tools_bytes and last.tools == now.tools
    is_alike = is_alike or (last.system_bytes and last.system == now.system)
    return not (is_alike or last.messages.hashes[:LINK_BYTES] == now.messages.hashes[:LINK_BYTES])


class History:
    """The last turns of a router process."""

    def __init__(self, ttl_s: float, capacity: int = MAX_SESSIONS) -> None:
        """`ttl_s`: after its last turn a session is forgotten."""
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._turns: OrderedDict[str, tuple[float, list[Turn]]] = OrderedDict()
        """By the session's link, the one seen last at the end: when that was, and its turns, the newest at
        the end.
        """

    def __len__(self) -> int:
        return len(self._turns)

    def follow(self, key: SessionKey, view: RequestView, now_s: float) -> tuple[bool, Change | None]:
        """(the session had a turn before, what this one changed). This turn is the last one from now on."""
        link = key.links[-1]
        seen_s, before = self._turns.pop(link, (now_s, []))
        if now_s - seen_s > self._ttl_s:
            before = []
        now = turn_of(view, before)
        if before and change_of(before[-1], now) is None:  # nearly always
            before[-1] = now
            self._turns[link] = now_s, before
            return True, None
        alike = [(change_of(last, now), last) for last in before if not is_other(last, now)]
        change, last = min(alike, key=lambda one: one[0].tokens if one[0] else -1, default=(None, None))
        turns = [*(one for one in before if one is not last), now][-MAX_THREADS:]
        self._turns[link] = now_s, turns
        for _ in range(2):  # for each that comes, so that they never pile up
            oldest_s, _turns = next(iter(self._turns.values()))
            if len(self._turns) > self._capacity or now_s - oldest_s > self._ttl_s:
                self._turns.popitem(last=False)
        return bool(before), change
