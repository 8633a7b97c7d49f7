"""Rates of tenants over the processes of several routers: what they tell each other, and what without. Pure.

Every process has whole token buckets for a tenant, as in `shared_limits`. What it charges it tells the others
by a channel that all of them hear, and each charges that too. So together they are one bucket, and no request
waits. An overshoot is that of the time until the others hear, and is deducted later.

- A message holds the sum that a process has charged since its start, so a lost message is made up for by the
  next one. Of a process that was not heard before, only what is new counts.
- A process hears its own messages, too. When it has not for `away_s`, the channel is away: from then on it
  holds an equal share of the rates, by the number of processes that it heard last. What is charged until the
  channel is back is told to nobody: it came out of shares.
- Who speaks in the channel is trusted with the rates, but not with sense. What cannot be read is dropped.
  Nobody costs a tenant more than a debt of four full buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState
from pdserve.router.tenants.token_bucket import TokenBucket

HEARTBEAT_S: Final = 0.5
"""Between two messages of a process that has charged nothing."""
SILENT_S: Final = 3.0
"""A process that was not heard for so long counts no more."""
MAX_SENDERS: Final = 1024
MAX_MESSAGE_BYTES: Final = 1024 * 1024
MAX_DEBT: Final = 4
"""In full buckets."""


class Charged(msgspec.Struct, array_like=True):
    """What a process has charged one tenant: all of it, and what is new since its last message."""

    requests: float
    tokens: float
    new_requests: float
    new_tokens: float


class Told(msgspec.Struct, array_like=True):
    """A message. Fields are only added, at the end, with defaults."""

    sender: str
    tenants: dict[str, Charged]


class _Sender:
    """Another process, as it was heard."""

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.sums: dict[str, tuple[float, float]] = {}
        """Tenant → (requests, tokens) of its last message about that tenant."""


class SharedRates:
    """One process's part."""

    def __init__(self, tenants: Tenants, name: str, *, away_s: float, processes: int, now_s: float) -> None:
        """`name`: no other process's. `processes`: the fewest that shares are made of."""
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
        self._told_s = -math.inf
        self._sums: dict[str, tuple[float, float]] = {}
        self._senders: dict[str, _Sender] = {}
        self.share = 1.0
        """Of the rates, in this process."""
        self.is_away = False
        """The channel does not work, and this process holds its share."""
        self.unread = 0
        """Messages that could not be read."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Told)

    def tick(self, now_s: float) -> bool:
        """See whether the channel works, and take the share that follows. True if that has changed."""
        was_away, self.is_away = self.is_away, now_s - self._echo_s > self._away_s
        if self.is_away and not was_away:
            # of what they charge until they are heard again, nothing came out of this share
            self._senders.clear()
        elif not self.is_away:
            if was_away:
                self._back_s = now_s
            for name in [name for name, one in self._senders.items() if now_s - one.heard_s > SILENT_S]:
                del self._senders[name]
            heard = 1 + len(self._senders)
            is_new = now_s - self._back_s < SILENT_S  # not all were heard yet
            self.processes = max(heard, self.processes) if is_new else heard
        self.share = 1 / max(self.processes, self._least) if self.is_away else 1.0
        for tenant in self._tenants.known:
            tenant.set_share(self.share, now_s)
        return was_away != self.is_away

    def message(self, now_s: float) -> bytes | None:
        """What is to be told now, if anything."""
        tenants = {}
        for tenant in self._tenants.known:
            if not tenant.has_rates:
                continue
            new = tenant.take_spent()
            if any(new) and not self.is_away:
                sums = self._sums.get(tenant.name, (0.0, 0.0))
                sums = self._sums[tenant.name] = (sums[0] + new[0], sums[1] + new[1])
                tenants[tenant.name] = Charged(*sums, *new)
        if not tenants and now_s - self._told_s < HEARTBEAT_S:
            return None
        self._told_s = now_s
        return self._encoder.encode(Told(self._name, tenants))

    def hear(self, data: object, now_s: float) -> None:
        """A message of any process came, this one's too."""
        try:
            if not isinstance(data, bytes) or len(data) > MAX_MESSAGE_BYTES:
                raise msgspec.DecodeError("no message of ours")
            told = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.unread += 1
            return
        if told.sender == self._name:
            self._echo_s = now_s
            return
        sender = self._senders.get(told.sender)
        if sender is None:
            if len(self._senders) >= MAX_SENDERS:
                self.unread += 1
                return
            sender = self._senders[told.sender] = _Sender()
        sender.heard_s = now_s
        for tenant, requests, tokens in self._new(sender, told):
            _charge(tenant, requests, tokens, now_s)

    def _new(self, sender: _Sender, told: Told) -> Iterator[tuple[TenantState, float, float]]:
        """(tenant, requests, tokens) that a process has charged since it was heard last."""
        for name, charged in told.tenants.items():
            tenant = self._tenants.get(name)
            numbers = (charged.requests, charged.tokens, charged.new_requests, charged.new_tokens)
            if tenant is None or not all(map(math.isfinite, numbers)):
                continue
            before = sender.sums.get(name)
            if before is None:
                before = charged.requests - charged.new_requests, charged.tokens - charged.new_tokens
            sender.sums[name] = charged.requests, charged.tokens
            if not self.is_away:
                yield tenant, charged.requests - before[0], charged.tokens - before[1]


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
