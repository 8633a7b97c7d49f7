"""Tenants' limits over the processes of one or several routers: what is told, and what follows from it.

All processes hear all messages in one order, their own ones too: Redis gives several routers that order, and
the parent the processes of one router. A process hears its own messages. When it has not for `away_s`, the
channel is away: from then on it holds an equal share of rates and concurrency, by the number of processes it
heard last. Messages of a process are numbered: one that comes behind a later one counts for nothing.

Rates. Every process has whole token buckets for a tenant. What it charges it tells the others, and each
charges that too. So together they are one bucket, and no request waits. An overshoot is that of the time
until the others hear, and is deducted later. What is told is the sum since the process's start, so a lost
message is made up for by the next one. Nobody costs a tenant more than a debt of four full buckets.

Concurrency. A tenant's limit is a number of *permits*. Each process holds some of them, and runs no more of
the tenant's requests than it holds:

- A process may give up permits by itself. It tells what it still holds.
- A process that wants more tells how many. It gets them when it hears its own message: as many as nobody
  held at that point of the order. All others count the same.
- A process tells nothing new before it has heard its last message.
- A process that has just begun to listen wants nothing until each other one has had time to tell.

Whether to give up or to want permits is decided by each for itself, by max-min fairness over what runs and
waits everywhere (`split`). Permits that nobody needs are spread evenly, so that a new request need not wait.
One that cannot be divided goes to the process that has waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from pdserve.router.app.router import Router
from pdserve.router.config.limits import RedisSettings
from pdserve.router.sessions.table import connect
from pdserve.router.tenants.tenant import Tenants, TenantState, TokenBucket

MAX_DEBT: Final = 4
"""In full buckets."""


class Charged(msgspec.Struct, array_like=True):
    """What a process has charged one tenant: all of it, and what is new since its last message."""

    requests: float
    tokens: float
    new_requests: float
    new_tokens: float


class SharedRates:
    """One process's part. Processes have names."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._sums: dict[str, tuple[float, float]] = {}
        self._heard: dict[str, dict[str, tuple[float, float]]] = {}
        """Another process → tenant → (requests, tokens) as it last told them."""

    def new(self, *, is_told: bool) -> dict[str, Charged]:
        """What was charged here since the last call. Nothing where nobody is to be told."""
        found = {}
        for tenant in self._tenants.known:
            if not tenant.has_rates:
                continue
            new = tenant.take_spent()
            if any(new) and is_told:
                sums = self._sums.get(tenant.name, (0.0, 0.0))
                sums = self._sums[tenant.name] = (sums[0] + new[0], sums[1] + new[1])
                found[tenant.name] = Charged(*sums, *new)
        return found

    def hear(self, sender: str, told: Mapping[str, Charged], now_s: float, *, is_charged: bool) -> None:
        """Another process has charged tenants. `is_charged` false: it came out of shares, and is noted."""
        sums = self._heard.setdefault(sender, {})
        for name, charged in told.items():
            tenant = self._tenants.get(name)
            numbers = (charged.requests, charged.tokens, charged.new_requests, charged.new_tokens)
            if tenant is None or not all(map(math.isfinite, numbers)):
                continue
            before = sums.get(name)
            if before is None:
                before = charged.requests - charged.new_requests, charged.tokens - charged.new_tokens
            sums[name] = charged.requests, charged.tokens
            if is_charged:
                _charge(tenant, charged.requests - before[0], charged.tokens - before[1], now_s)

    def forget(self, sender: str) -> None:
        """That process was not heard any more."""
        self._heard.pop(sender, None)


def _charge(tenant: TenantState, requests: float, tokens: float, now_s: float) -> None:
    tenant.charge_elsewhere(
        _bounded(tenant.requests, requests, now_s), _bounded(tenant.tokens, tokens, now_s), now_s
    )


def _bounded(bucket: TokenBucket | None, amount: float, now_s: float) -> float:
    """Of `amount` what may be charged, or given back."""
    if bucket is None:
        return 0.0
    most = max(0.0, bucket.held(now_s) + MAX_DEBT * bucket.capacity)
    return max(-bucket.capacity, min(most, amount))


P = TypeVar("P")
"""What processes are known by."""
MAX_PERMITS: Final = 1_000_000
MAX_TURN: Final = 1 << 53


class Permit(msgspec.Struct, array_like=True, frozen=True):
    """What a process tells of one tenant."""

    limit: int
    held: int
    """It runs at most so many. Never more than others know."""
    wanted: int
    """It wants to hold so many."""
    running: int
    waiting: int
    """Requests that wait for nothing but more places."""
    turn: int = 0
    """When it last ran something or wanted more, by a count that all of them continue (Lamport's clock)."""

    @property
    def is_sensible(self) -> bool:
        """No number is one that no process would tell."""
        if not 0 <= self.turn <= MAX_TURN:
            return False
        return all(
            0 <= n <= MAX_PERMITS for n in (self.limit, self.held, self.wanted, self.running, self.waiting)
        )


class _Holding:
    """What is known of one tenant at one process."""

    __slots__ = ("demand", "held", "turn")

    def __init__(self) -> None:
        self.held = 0
        self.demand = 0
        self.turn = 0


class _Book:
    """What is known of one tenant. `changes` counts them, so that a tenant at rest costs nothing."""

    __slots__ = ("changes", "of")

    def __init__(self) -> None:
        self.of: dict[str, _Holding] = {}
        self.changes = 0

    @property
    def next_turn(self) -> int:
        """Behind all others."""
        return min(MAX_TURN, max((one.turn for one in self.of.values()), default=0) + 1)

    def others(self, process: str) -> int:
        """The places that all others hold."""
        return sum(one.held for name, one in self.of.items() if name != process)

    def turn_of(self, process: str) -> int:
        """As it was heard."""
        holding = self.of.get(process)
        return 0 if holding is None else holding.turn

    def forget(self, process: str) -> None:
        if self.of.pop(process, None) is not None:
            self.changes += 1


class SharedPermits:
    """One process's part. Until it may want places, tenants with a limit run nothing here."""

    def __init__(self, tenants: Tenants, held_back: Callable[[TenantState], int], name: str) -> None:
        """`held_back`: how many of a tenant's requests here wait for nothing but more places."""
        self._tenants = tenants
        self._held_back = held_back
        self._name = name
        self._books: dict[str, _Book] = {}
        self._told: dict[str, tuple[tuple[int, ...], Permit]] = {}
        """Tenant → (what its place was computed from, that place)."""
        tenants.granted = 0

    def tell(self, processes: Collection[str], *, wants: bool) -> tuple[dict[str, Permit], bool]:
        """(what this process holds and wants, whether that is new). Gives up what others need. `processes`:
        all that are there, this one too. `wants`: it knows what others hold, and has heard its last message.
        """
        places, is_new = {}, False
        for tenant in self._tenants.known:
            limit = tenant.limits.concurrency
            if not limit:
                continue
            book = self._books.setdefault(tenant.name, _Book())
            running, waiting = tenant.running, self._held_back(tenant)
            state = (limit, running, waiting, tenant.granted or 0, book.changes, len(processes), int(wants))
            before = self._told.get(tenant.name)
            if before is None or before[0] != state:
                place = self._place(tenant, book, processes, running, waiting, wants=wants)
                is_new |= before is None or place != before[1]
                self._told[tenant.name] = state, place
            place = self._told[tenant.name][1]
            turn = book.next_turn if running or place.wanted > place.held else book.turn_of(self._name)
            places[tenant.name] = msgspec.structs.replace(place, turn=turn)
        return places, is_new

    def hear(self, sender: str, places: Mapping[str, Permit], *, is_mine: bool) -> bool:
        """A message came. `is_mine`: of this process, which wanted what it says. True if it got places."""
        has_more = False
        for name, place in places.items():
            if place.is_sensible and (tenant := self._tenants.get(name)) is not None:
                held = self._take_in(sender, name, place)
                if is_mine and held > place.held:  # else it holds for what still runs, and may start no more
                    tenant.granted, has_more = held, True
        for name in self._books.keys() - places.keys():
            self._books[name].forget(sender)
        return has_more

    def _take_in(self, sender: str, name: str, place: Permit) -> int:
        """Note what a process holds now. Returns it."""
        book = self._books.setdefault(name, _Book())
        held = place.held + max(0, min(place.wanted, place.limit - book.others(sender)) - place.held)
        holding = book.of.setdefault(sender, _Holding())
        demand = place.running + place.waiting
        if (held, demand, place.turn) != (holding.held, holding.demand, holding.turn):
            holding.held, holding.demand, holding.turn = held, demand, place.turn
            book.changes += 1
        return held

    def forget(self, sender: str) -> None:
        """That process was not heard any more: what it held is free."""
        for book in self._books.values():
            book.forget(sender)

    def forget_all(self) -> None:
        """What was heard counts no more: messages may have been lost."""
        self._books.clear()
        self._told.clear()

    def part(self, processes: int) -> None:
        """The channel is away: hold an equal share of each limit."""
        for tenant in self._tenants.known:
            tenant.granted = max(1, tenant.limits.concurrency // processes)

    def _place(
        self,
        tenant: TenantState,
        book: _Book,
        processes: Iterable[str],
        running: int,
        waiting: int,
        *,
        wants: bool,
    ) -> Permit:
        limit, granted = tenant.limits.concurrency, tenant.granted or 0
        if not wants:
            held = max(running, granted)
            return Permit(limit, held, held, running, waiting)
        holdings = {process: book.of.get(process) or _Holding() for process in processes}
        demands = {process: one.demand for process, one in holdings.items()}
        demands[self._name] = running + waiting
        by_turn = sorted(holdings, key=lambda process: (holdings[process].turn, process))
        fair = split(limit, {process: demands[process] for process in by_turn})[self._name]
        others = book.others(self._name)
        is_short = any(
            demands[process] > one.held or not (one.held or limit < len(holdings))
            for process, one in holdings.items()
            if process != self._name
        )
        if is_short or others + granted > limit:
            granted = tenant.granted = min(granted, fair)
        held = max(running, granted)
        wanted = max(held, min(fair, limit - others))
        return Permit(limit, held, wanted, running, waiting)


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


HEARTBEAT_S: Final = 0.5
"""Between two messages of a process that has nothing new to tell."""
SETTLE_S: Final = 0.75
"""Of listening, after which every other process has told what it holds."""
SILENT_S: Final = 3.0
"""A process that was not heard for so long counts no more."""
MAX_SENDERS: Final = 1024
MAX_MESSAGE_BYTES: Final = 1024 * 1024


class Told(msgspec.Struct, array_like=True):
    """A message. Fields are only added, at the end, with defaults."""

    sender: str
    charged: dict[str, Charged]
    number: int = 0
    """Grows with each message of the sender. 0: an older version sent it."""
    places: dict[str, Permit] | None = None
    """By tenant, all that have a limit; None: as before."""


class _Sender:
    """Another process, as it was heard."""

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.number = 0


class Agreement:
    """One process's part."""

    def __init__(
        self,
        tenants: Tenants,
        held_back: Callable[[TenantState], int],
        name: str,
        *,
        away_s: float,
        processes: int,
        now_s: float,
    ) -> None:
        """`name`: no other process's. `processes`: the fewest that shares are made of. `held_back`: how many
        of a tenant's requests wait here for nothing but a larger share of its concurrency.
        """
        self._tenants = tenants
        self._name = name
        self._away_s = away_s
        self._least = processes
        self.processes = 1
        """Heard when the channel was there last, this one too."""
        self._back_s = now_s
        """When the channel came back."""
        self._echo_s = now_s
        """When this process heard itself last, and at its start."""
        self._listens_s = math.inf
        """When this process heard itself first by what it listens to now."""
        self._told_s = self._placed_s = -math.inf
        self._number = self._placed = self._heard = 0
        """Of the last message, of the last one with places, and of the last one that was heard."""
        self._senders: dict[str, _Sender] = {}
        self._rates = SharedRates(tenants)
        self._places = SharedPermits(tenants, held_back, name)
        self.share = 1.0
        """Of the rates, in this process."""
        self.is_away = False
        """The channel does not work, and this process holds its share."""
        self.unread = 0
        """Messages that could not be read."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Told)

    def listen(self) -> None:
        """From now on every message is heard. Those before may have been missed."""
        self._listens_s = math.inf
        self._places.forget_all()

    def tick(self, now_s: float) -> bool:
        """See whether the channel works, and take the share that follows. True if that has changed."""
        was_away, self.is_away = self.is_away, now_s - self._echo_s > self._away_s
        if self.is_away and not was_away:
            # of what they charge until they are heard again, nothing came out of this share
            for name in list(self._senders):
                self._forget(name)
        elif not self.is_away:
            if was_away:
                self._back_s = now_s
            for name in [name for name, one in self._senders.items() if now_s - one.heard_s > SILENT_S]:
                self._forget(name)
            heard = 1 + len(self._senders)
            is_new = now_s - self._back_s < SILENT_S  # not all were heard yet
            self.processes = max(heard, self.processes) if is_new else heard
        parts = max(self.processes, self._least)
        self.share = 1 / parts if self.is_away else 1.0
        if self.is_away:
            self._listens_s = math.inf
            self._places.part(parts)
        for tenant in self._tenants.known:
            tenant.set_share(self.share, now_s)
        return was_away != self.is_away

    def message(self, now_s: float) -> bytes | None:
        """What is to be told now, if anything."""
        charged = self._rates.new(is_told=not self.is_away)
        places = self._news(now_s)
        if not charged and places is None and now_s - self._told_s < HEARTBEAT_S:
            return None
        self._told_s = now_s
        self._number += 1
        if places is not None:
            self._placed_s, self._placed = now_s, self._number
        return self._encoder.encode(Told(self._name, charged, self._number, places))

    def _news(self, now_s: float) -> dict[str, Permit] | None:
        """Places that are to be told. None while what was told last may still be heard."""
        wants = self._may_want(now_s)
        if wants and self._heard < self._placed:
            return None
        places, is_new = self._places.tell([self._name, *self._senders], wants=wants)
        return places if is_new or now_s - self._placed_s >= HEARTBEAT_S else None

    def _may_want(self, now_s: float) -> bool:
        return not self.is_away and now_s - self._listens_s >= SETTLE_S

    def hear(self, data: object, now_s: float) -> bool:
        """A message of any process came, this one's too. True if a tenant may run more requests by it."""
        try:
            if not isinstance(data, bytes) or len(data) > MAX_MESSAGE_BYTES:
                raise msgspec.DecodeError("no message of ours")
            told = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.unread += 1
            return False
        if told.sender == self._name:
            return self._hear_own(told, now_s)
        sender = self._senders.get(told.sender)
        if sender is None:
            if len(self._senders) >= MAX_SENDERS:
                self.unread += 1
                return False
            sender = self._senders[told.sender] = _Sender()
        elif told.number and told.number <= sender.number:
            return False
        sender.heard_s, sender.number = now_s, told.number
        self._rates.hear(told.sender, told.charged, now_s, is_charged=not self.is_away)
        if told.places is not None:
            self._places.hear(told.sender, told.places, is_mine=False)
        return False

    def _hear_own(self, told: Told, now_s: float) -> bool:
        if not self._heard < told.number <= self._number:
            return False
        self._echo_s, self._heard = now_s, told.number
        self._listens_s = min(self._listens_s, now_s)
        if told.places is None:
            return False
        return self._places.hear(self._name, told.places, is_mine=self._may_want(now_s))

    def _forget(self, sender: str) -> None:
        del self._senders[sender]
        self._rates.forget(sender)
        self._places.forget(sender)


logger = logging.getLogger(__name__)

REPORT_S: Final = 0.1
"""Between two looks whether there is something to tell."""
NAME_BYTES: Final = 12
CLOSE_S: Final = 1.0


class TenantLimits:
    """One process's agreement, and what follows from it for the process."""

    def __init__(self, router: Router, *, away_s: float, processes: int) -> None:
        """`processes`: the fewest that shares are made of where nobody is heard."""
        self._stats = router.stats
        self._gate = router.gate
        self._loop = asyncio.get_running_loop()
        self.agreement = Agreement(
            router.gate.tenants,
            router.gate.queue.held_back,
            secrets.token_hex(NAME_BYTES),
            away_s=away_s,
            processes=processes,
            now_s=self._loop.time(),
        )

    def news(self) -> bytes | None:
        """The message that is to be told now, if any. Whether it arrived shows when it is heard."""
        now_s = self._loop.time()
        if self.agreement.tick(now_s):
            self._note()
        return self.agreement.message(now_s)

    def hear(self, data: object) -> None:
        """A message of any process came, this one's too."""
        if self.agreement.hear(data, self._loop.time()):
            self._gate.fill()

    def _note(self) -> None:
        self._stats.limits_apart = int(self.agreement.is_away)
        if self.agreement.is_away:
            logger.warning(
                "other processes are not heard; this one holds %.0f %% of the tenants' limits until they are",
                100 * self.agreement.share,
            )
        else:
            logger.info("the tenants' limits are shared again")
        self._gate.fill()


class RedisChannel:
    """Tells and hears. The constructor raises ConfigError; later failures only put off the next try."""

    def __init__(self, router: Router, settings: RedisSettings) -> None:
        self._stats = router.stats
        self._settings = settings
        self._channel = f"{settings.prefix}limits"
        self._loop = asyncio.get_running_loop()
        self._redis, self._errors = connect(settings, settings.away_s)
        self.limits = TenantLimits(router, away_s=settings.away_s, processes=settings.processes)

    async def hear(self) -> None:
        """Until the connection fails, or is silent: this process itself speaks every half second."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            async with asyncio.timeout(self._settings.away_s):
                await channel.subscribe(self._channel)
            self.limits.agreement.listen()
            heard_s = self._loop.time()
            while self._loop.time() - heard_s < 2 * self._settings.away_s:
                message = await channel.get_message(timeout=self._settings.away_s)
                if message is not None:
                    heard_s = self._loop.time()
                    self.limits.hear(message.get("data"))

    async def tell(self) -> None:
        """What is to be told now."""
        if (data := self.limits.news()) is not None:
            async with asyncio.timeout(self._settings.away_s / 2):
                await self._redis.publish(self._channel, data)

    async def keep(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, until cancelled."""
        while True:
            try:
                await step()
            except self._errors:
                pass  # it shows as silence
            except Exception:  # boundary: a background task, and Redis may answer what its client cannot take
                logger.exception("the channel of tenants' limits failed; it begins again")
                self._stats.task_failures["limits"] += 1
            await asyncio.sleep(REPORT_S)

    async def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(*self._errors):
            async with asyncio.timeout(CLOSE_S):
                await self._redis.aclose()


@contextlib.asynccontextmanager
async def shared_limits(router: Router) -> AsyncIterator[Agreement | None]:
    """Tenants' limits are shared over Redis, if it is configured, while the block runs. None: it is not.
    Raises ConfigError.
    """
    settings = router.config.redis
    if not settings.shares_limits:
        yield None
        return
    channel = RedisChannel(router, settings)
    steps = channel.tell, channel.hear
    tasks = [asyncio.create_task(channel.keep(step), name="router-limits") for step in steps]
    try:
        yield channel.limits.agreement
    finally:
        await _end(tasks)
        await channel.close()


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them until they have ended: redis-py can take a cancellation at a deadline for the deadline."""
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CLOSE_S)
