"""What the processes of one or several routers tell each other of tenants, and what each does without. Pure.

All of them hear one channel. `shared_rates` says what is charged by it, `shared_places` who may run how many
requests. Here is who is there, and whether the channel works:

- A process hears its own messages, too. When it has not for `away_s`, the channel is away: from then on it
  holds an equal share of rates and concurrency, by the number of processes that it heard last. What is
  charged until the channel is back is told to nobody: it came out of shares.
- Messages of a process are numbered. One that comes behind a later one counts for nothing.
- What cannot be read is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from pdserve.router.processes.shared_places import Place, SharedPlaces
from pdserve.router.processes.shared_rates import Charged, SharedRates
from pdserve.router.tenants.registry import Tenants
from pdserve.router.tenants.tenant import TenantState

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
    places: dict[str, Place] | None = None
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
        self._places = SharedPlaces(tenants, held_back, name)
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

    def _news(self, now_s: float) -> dict[str, Place] | None:
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
