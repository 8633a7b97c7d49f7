"""What router processes tell each other, and what follows from it. Pure.

At most every `REPORT_S` a process publishes what is new: what it has charged each limited tenant and what
that tenant runs and waits for, and its sessions' turns. All processes are equal; nobody counts for the
others.

Rates. Each process has the whole token buckets of a tenant, and charges them what the others have charged. So
together they are one bucket, and no request waits. What is told is a sum since the process's start, so the
next message makes up for a lost one. Nobody's word costs a tenant more than a debt of `MAX_DEBT` full
buckets.

Concurrency. A process runs at most its part of a tenant's limit (`split`: max-min fairness over what runs and
waits everywhere, and what nobody needs, evenly), and at most what runs nowhere else. It computes its part
from the demand that it has *told*, not from its present one: when it takes more, the others have heard that
it wants more. So the limit is overrun only by what starts while messages are late or lost. What cannot be
divided goes to each process in turn, for `TURN_S`.

Kept conversations. A process lets a tenant have so many tokens kept as its limit leaves beside what others
have told that they keep for it. A conversation whose turns go to two processes counts at both, until its time
is over at the first.

Sessions. Turns of others, and ends of sessions, go into the process's own table, and of two turns the later
one counts. No look-up waits for anybody.

Newcomers. A process that starts holds an equal part of each limit for `SETTLE_S`. Meanwhile the others, which
hear it for the first time, tell it everything: sums, how full the buckets are, and the sessions. The oldest
of its siblings tells it all sessions, and each sibling those of late, which may still be on their way to the
oldest.

Carriers. Siblings, the processes of one router, hear each other by sockets that do not fail while they live.
Routers of several hosts hear each other by Redis. A process that does not hear its own word through Redis for
`AWAY_S` forgets the other hosts, and its router holds its part of every limit, by the number of processes
that it heard last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec

from pdserve.router.sessions.table import SessionEntry, SessionTable
from pdserve.router.tenants.tenant import Tenants, TenantState, TokenBucket

REPORT_S: Final = 0.1
"""Between two publications of a process that has news."""
HEARTBEAT_S: Final = 0.5
"""Between two of one that has none."""
SETTLE_S: Final = 0.25
"""From a process's start until the others have told it everything: two reports, and a moment."""
SILENT_S: Final = 3.0
"""A process that was not heard for so long counts no more."""
AWAY_S: Final = 1.5
"""Three heartbeats of its own that a process has not heard by the remote carrier."""
TURN_S: Final = 1.0
MAX_DEBT: Final = 4
"""In full buckets."""
MAX_MESSAGE_BYTES: Final = 64 * 1024
MAX_ROWS: Final = 256
"""Of tenants or turns in a message. A row has some 100 bytes."""
MAX_PEERS: Final = 1024
MAX_RUNNING: Final = 1 << 40
MAX_LINK_CHARS: Final = 1024
HANDED_OVER: Final = 8
"""Messages with sessions for a newcomer, at each report: 20,000 sessions a second."""
MAX_HANDED_OVER: Final = 400
"""The same of a process that ends: 100,000 sessions."""

P = TypeVar("P")
T = TypeVar("T")


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """One tenant at the sender. Fields are only added, at the end, with defaults."""

    requests: float = 0.0
    """Charged since the sender's start."""
    tokens: float = 0.0
    new_requests: float = 0.0
    """Of them, since its message before: for who hears of this tenant for the first time."""
    new_tokens: float = 0.0
    running: int = 0
    waiting: int = 0
    """Requests that wait for nothing but the tenant's concurrency."""
    requests_left: float = 0.0
    """In the bucket; 0 where there is none."""
    tokens_left: float = 0.0
    kept: int = 0
    """Tokens that are kept for it in the pool."""

    @property
    def demand(self) -> int:
        """The most requests that it would run now."""
        return self.running + self.waiting

    @property
    def is_sensible(self) -> bool:
        """No number is one that no process would tell."""
        return all(map(math.isfinite, msgspec.structs.astuple(self))) and (
            all(0 <= count <= MAX_RUNNING for count in (self.running, self.waiting, self.kept))
        )


class Turn(msgspec.Struct, array_like=True, frozen=True):
    """The last turn of one session, or its end. Fields are only added, at the end."""

    link: str
    replaced: tuple[str, ...]
    """Links that the session's earlier turns were stored under."""
    seen_unix_s: float
    entry: SessionEntry | None
    """As in the sender's table; None: the session is over."""


class News(msgspec.Struct, array_like=True, frozen=True):
    """A message. Fields are only added, at the end, with defaults."""

    sender: str
    number: int
    """Grows with each message of the sender."""
    usage: dict[str, Usage] = {}
    turns: tuple[Turn, ...] = ()
    is_last: bool = False
    """The sender ends."""
    asks: bool = False
    """Siblings are to write their metrics now."""


class Outgoing(NamedTuple):
    """A message to be sent; `to` None: to all."""

    data: bytes
    to: str | None = None


class _Peer:
    """Another process, as it was heard."""

    __slots__ = ("heard_s", "is_sibling", "number", "usage")

    def __init__(self) -> None:
        self.heard_s = -math.inf
        self.is_sibling = False
        self.number = 0
        self.usage: dict[str, Usage] = {}


class Gossip:
    """One process's part: `tick` says what to publish, `hear` takes in what others have."""

    def __init__(
        self,
        name: str,
        tenants: Tenants,
        sessions: SessionTable,
        held_back: Callable[[TenantState], int],
        *,
        siblings: int,
        is_remote: bool,
        now_s: float,
        unix_s: float,
    ) -> None:
        """`name`: no other process's; of siblings the oldest one's comes first. `held_back`: how many of a
        tenant's requests here wait for nothing but more concurrency. `siblings`: the processes of this
        router, this one too. `is_remote`: there is a carrier to other hosts.
        """
        self._name = name
        self._tenants = tenants
        self._sessions = sessions
        self._held_back = held_back
        self._siblings = siblings
        self._is_remote = is_remote
        self._settled_s = now_s + SETTLE_S
        self._echo_s = now_s
        """When this process heard itself last by the remote carrier."""
        self._back_s = -math.inf
        """When the remote carrier came back: not all hosts were heard since."""
        self._beat_s = -math.inf
        self._number = 0
        self._peers: dict[str, _Peer] = {}
        self._told: dict[str, Usage] = {}
        """Of each limited tenant that was used here, as told last."""
        self._changed_s: dict[str, float] = {}
        self._lately: dict[str, int] = {}
        """Demand before the last report, of tenants for which that was another one."""
        self._has_met = False
        """Somebody new is to be answered, and told of all tenants."""
        self._owed: dict[str, Iterator[tuple[str, SessionEntry]]] = {}
        """Newcomer → sessions that it is to be told."""
        self._together = 1
        """Processes when all carriers worked last, this one too."""
        self.share = 1.0
        """Of all limits, that of the processes that hear each other."""
        self.is_away = False
        """The remote carrier does not work."""
        self.has_more = False
        """A tenant may run more here; whoever has seen that resets it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(News)
        tenants.granted = 0
        self._listen_to_sessions()
        self._grant_all(now_s, unix_s)

    @property
    def processes(self) -> int:
        """That are heard, this one too."""
        return 1 + len(self._peers)

    # --- telling

    def tick(self, now_s: float, unix_s: float) -> list[Outgoing]:
        """What is to be published now. To be called every `REPORT_S`, or earlier when there is news."""
        self._look_around(now_s)
        is_whole, self._has_met = self._has_met, False
        is_beat = now_s - self._beat_s >= HEARTBEAT_S
        if is_beat:
            self._beat_s = now_s
        usage = self._new_usage(now_s, is_whole=is_whole, is_beat=is_beat)
        news = self._sessions.news or {}
        self._listen_to_sessions()
        turns = [
            _turn(link, entry, unix_s - now_s if entry else unix_s, more)
            for link, (entry, more) in news.items()
        ]
        messages = [Outgoing(self._encoded(usage=part)) for part in _parts(usage)]
        messages += [message for part in _parts(turns) for message in self._with_turns(part, None)]
        if not messages and (is_whole or is_beat):
            messages = [Outgoing(self._encoded())]
        messages += self._handed_over(unix_s - now_s, HANDED_OVER)
        self._grant_all(now_s, unix_s)
        return messages

    def last(self, unix_s: float, now_s: float) -> list[Outgoing]:
        """What is to be published as the process ends: all that others have to know of it."""
        messages = [*self.tick(now_s, unix_s), *self._handed_over(unix_s - now_s, MAX_HANDED_OVER)]
        return [*messages, Outgoing(self._encoded(is_last=True))]

    def ask(self) -> bytes:
        """Asks the siblings to write their metrics."""
        return self._encoded(asks=True)

    def _look_around(self, now_s: float) -> None:
        was_away, self.is_away = self.is_away, self._is_remote and now_s - self._echo_s > AWAY_S
        has_left = self.is_away and not was_away
        for name, peer in list(self._peers.items()):
            if now_s - peer.heard_s > SILENT_S or (has_left and not peer.is_sibling):
                self._forget(name)
        if was_away and not self.is_away:
            self._back_s = now_s
        if not self.is_away:
            is_coming_back = now_s - self._back_s < SILENT_S
            self._together = max(self.processes, self._together if is_coming_back else 1)
        self.share = min(1.0, self.processes / self._together) if self.is_away else 1.0
        for tenant in self._tenants.known:
            tenant.set_share(self.share, now_s)

    def _new_usage(self, now_s: float, *, is_whole: bool, is_beat: bool) -> list[tuple[str, Usage]]:
        """Of tenants whose figures have changed; at every heartbeat also of those that run something or have
        changed of late, for who has missed a message; and for a newcomer of all.
        """
        found = []
        self._lately.clear()
        for tenant in self._tenants.known:
            limits = tenant.limits
            if not (limits.concurrency or tenant.has_rates or limits.retain_tokens):
                continue
            before = self._told.get(tenant.name, _UNUSED)
            usage = Usage(
                tenant.charged_requests,
                tenant.charged_tokens,
                tenant.charged_requests - before.requests,
                tenant.charged_tokens - before.tokens,
                tenant.running,
                self._held_back(tenant),
                _left(tenant.requests, now_s),
                _left(tenant.tokens, now_s),
                tenant.kept_tokens(now_s) if tenant.kept else 0,
            )
            if usage.new_requests or usage.new_tokens or _counts(usage) != _counts(before):
                self._changed_s[tenant.name] = now_s
            elif before is _UNUSED:
                continue
            elif not is_whole:
                is_of_late = before.demand or before.kept or now_s - self._changed_s[tenant.name] < SILENT_S
                if not (is_beat and is_of_late):
                    continue
            self._told[tenant.name] = usage
            self._lately[tenant.name] = before.demand
            found.append((tenant.name, usage))
        return found

    def _listen_to_sessions(self) -> None:
        """A process that nobody hears keeps no news. Siblings may hear before they are heard."""
        is_heard = self._peers or self._is_remote or self._siblings > 1
        self._sessions.news = {} if is_heard else None

    def _handed_over(self, unix_offset_s: float, most: int) -> Iterator[Outgoing]:
        for name in list(self._owed):
            for _ in range(most):
                rows = list(islice(self._owed[name], MAX_ROWS))
                if not rows:
                    del self._owed[name]
                    break
                yield from self._with_turns([_turn(*row, unix_offset_s) for row in rows], name)

    def _with_turns(self, turns: list[Turn], to: str | None) -> list[Outgoing]:
        data = self._encoded(turns=turns)
        if len(data) <= MAX_MESSAGE_BYTES:
            return [Outgoing(data, to)]
        half = len(turns) // 2
        if not half:  # no client can make it so long but by a name that a model has
            return []
        return self._with_turns(turns[:half], to) + self._with_turns(turns[half:], to)

    def _encoded(
        self,
        usage: Iterable[tuple[str, Usage]] = (),
        turns: Iterable[Turn] = (),
        *,
        is_last: bool = False,
        asks: bool = False,
    ) -> bytes:
        self._number += 1
        return self._encoder.encode(News(self._name, self._number, dict(usage), tuple(turns), is_last, asks))

    # --- hearing

    def hear(self, data: object, now_s: float, unix_s: float, *, is_sibling: bool) -> News | None:
        """A message of any process came, perhaps this one's. Returns it if it was of another, and could be
        read.
        """
        try:
            if not isinstance(data, bytes) or len(data) > MAX_MESSAGE_BYTES:
                return None
            news = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if news.sender == self._name:
            if not is_sibling and news.number <= self._number:
                self._echo_s = now_s
            return None
        if news.is_last:
            self._forget(news.sender)
            return news
        peer = self._peers.get(news.sender)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                return None
            peer = self._peers[news.sender] = _Peer()
            self._has_met = True
            if self._sessions.news is None:
                self._listen_to_sessions()
        peer.heard_s = now_s
        if is_sibling and not peer.is_sibling:
            peer.is_sibling = True
            self._owed[news.sender] = iter(self._sessions_for(news.sender, now_s))
        for turn in news.turns:
            self._take_turn(turn, now_s, unix_s)
        if news.number > peer.number:  # else it comes behind a later one
            peer.number = news.number
            for name, usage in news.usage.items():
                if usage.is_sensible and (tenant := self._tenants.get(name)) is not None:
                    self._take_usage(peer, tenant, usage, now_s)
        if news.usage:
            self._grant_all(now_s, unix_s, news.usage)
        return news

    def _sessions_for(self, newcomer: str, now_s: float) -> list[tuple[str, SessionEntry]]:
        sessions = self._sessions.items()
        others = [name for name, peer in self._peers.items() if peer.is_sibling and name != newcomer]
        if all(self._name < name for name in others):  # the oldest knows most
            return sessions
        return [(link, entry) for link, entry in sessions if now_s - entry.seen_s < SILENT_S]

    def _forget(self, name: str) -> None:
        self._peers.pop(name, None)
        self._owed.pop(name, None)

    def _take_usage(self, peer: _Peer, tenant: TenantState, usage: Usage, now_s: float) -> None:
        before = peer.usage.get(tenant.name)
        peer.usage[tenant.name] = usage
        if now_s < self._settled_s:  # it starts: what is left there is left here
            _lower(tenant.requests, usage.requests_left, now_s)
            _lower(tenant.tokens, usage.tokens_left, now_s)
            return
        requests, tokens = usage.new_requests, usage.new_tokens
        if before is not None:
            requests, tokens = usage.requests - before.requests, usage.tokens - before.tokens
        tenant.charge_elsewhere(
            _bounded(tenant.requests, requests, now_s), _bounded(tenant.tokens, tokens, now_s), now_s
        )

    def _take_turn(self, turn: Turn, now_s: float, unix_s: float) -> None:
        entry, texts = turn.entry, [turn.link, *turn.replaced]
        if entry is not None:
            texts += entry.request_id, entry.decode_id, entry.prefill_id
        if any(len(text) > MAX_LINK_CHARS for text in texts) or not math.isfinite(turn.seen_unix_s):
            return
        age_s = max(0.0, unix_s - turn.seen_unix_s)
        if age_s > self._sessions.ttl_s:
            return
        if entry is not None:
            entry = msgspec.structs.replace(
                entry,
                seen_s=now_s - age_s,
                incarnation="",
                tokens=max(0, entry.tokens),
                turns=max(1, entry.turns),
                shared_tokens=max(0, entry.shared_tokens),
            )
        self._sessions.merge(turn.link, turn.replaced, entry, now_s - age_s)

    # --- concurrency

    def _grant_all(self, now_s: float, unix_s: float, names: Iterable[str] | None = None) -> None:
        """Say how many requests of each tenant, or of those named, may run here."""
        tenants = self._tenants.known if names is None else filter(None, map(self._tenants.get, names))
        for tenant in tenants:
            if tenant.limits.retain_tokens:
                kept = (peer.usage.get(tenant.name, _UNUSED).kept for peer in self._peers.values())
                tenant.kept_elsewhere = sum(kept)
            if tenant.limits.concurrency:
                granted = self._granted(tenant, now_s, unix_s)
                self.has_more |= granted > (tenant.granted or 0)
                tenant.granted = granted

    def _granted(self, tenant: TenantState, now_s: float, unix_s: float) -> int:
        limit = max(1, int(tenant.limits.concurrency * self.share))
        if now_s < self._settled_s and (self._peers or self._siblings > 1):
            return limit // max(self._siblings, self.processes)
        if not self._peers:
            return limit
        name, mine = tenant.name, self._told.get(tenant.name, _UNUSED)
        told = {peer: one.usage.get(name, _UNUSED) for peer, one in self._peers.items()} | {self._name: mine}
        demands = {peer: usage.demand for peer, usage in told.items()}
        demands[self._name] = min(mine.demand, self._lately.get(name, mine.demand))
        running = {peer: usage.running for peer, usage in told.items()}
        # who had the first turn may not know yet that it is over
        moments_s = unix_s, unix_s - 2 * REPORT_S
        return min(granted(limit, demands, running, _in_turn(told, at))[self._name] for at in moments_s)


_UNUSED: Final = Usage()


def _counts(usage: Usage) -> tuple[int, int, int]:
    return usage.running, usage.waiting, usage.kept


def _left(bucket: TokenBucket | None, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.held(now_s)


def _lower(bucket: TokenBucket | None, left: float, now_s: float) -> None:
    """Let the bucket hold no more than `left`."""
    if bucket is not None and (excess := bucket.held(now_s) - max(left, -MAX_DEBT * bucket.capacity)) > 0:
        bucket.charge(excess, now_s)


def _bounded(bucket: TokenBucket | None, amount: float, now_s: float) -> float:
    """Of `amount` what may be charged, or given back."""
    if bucket is None:
        return 0.0
    most = max(0.0, bucket.held(now_s) + MAX_DEBT * bucket.capacity)
    return max(-bucket.capacity, min(most, amount))


def _turn(link: str, entry: SessionEntry | None, unix_offset_s: float, replaced: Iterable[str] = ()) -> Turn:
    seen_unix_s = unix_offset_s
    if entry is not None:  # incarnations are this process's own
        seen_unix_s += entry.seen_s
        entry = msgspec.structs.replace(entry, incarnation="")
    return Turn(link, tuple(replaced), seen_unix_s, entry)


def _parts(rows: list[T]) -> Iterator[list[T]]:
    return (rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS))


def _in_turn(processes: Iterable[str], unix_s: float) -> list[str]:
    """All of them; each is the first for `TURN_S`."""
    names = sorted(processes)
    first = int(unix_s / TURN_S) % len(names)
    return names[first:] + names[:first]


def granted(
    limit: int, demands: Mapping[P, int], running: Mapping[P, int], processes: Iterable[P]
) -> dict[P, int]:
    """How many requests each of the processes may run, by what all of them have told. Who runs more than its
    part starts nothing, and the others share what that leaves of the limit.
    """
    parts = split(limit, {process: demands[process] for process in processes})
    free = max(0, limit - sum(running.values()))
    more = _max_min(free, {one: max(0, part - running[one]) for one, part in parts.items()})
    return {one: min(part, running[one] + more[one]) for one, part in parts.items()}


def split(limit: int, demands: Mapping[P, int]) -> dict[P, int]:
    """`limit` divided by max-min fairness over `demands`, and what no process needs, evenly. Adds up to
    `limit`. The first in `demands` gets what cannot be divided.
    """
    needed = _max_min(limit, demands)
    spare = limit - sum(needed.values())
    evenly = _max_min(spare, dict.fromkeys(demands, spare))
    return {process: needed[process] + evenly[process] for process in demands}


def _max_min(amount: int, demands: Mapping[P, int]) -> dict[P, int]:
    """Nobody gets more than its demand, and nobody less than another but to its own demand or by 1."""
    given, left = dict.fromkeys(demands, 0), amount
    while left and (short := [process for process in demands if given[process] < demands[process]]):
        each = max(1, left // len(short))
        for process in short:
            more = min(each, demands[process] - given[process], left)
            given[process] += more
            left -= more
    return given
