"""Which members a node watches, and which it declares dead. Pure: events in, actions out, time an argument.

Each node watches the next few members on a circle ordered by a hash of their names. So a few nodes watch each
member, and nodes need not agree on the assignment. This is SWIM (Das, Gupta, Motivala, 2002) with fixed
neighbours instead of random ones: so the time to notice a loss has an upper bound.

    a watched member is pinged every `ping_interval_s`, one ping at a time
      it answers, or any message comes from it       ->  alive
      it refuses or hangs up                         ->  again at once; the second time: suspect
      no message for `ping_timeout_s`                ->  suspect
      it says that it is being upgraded              ->  no suspicion for UPGRADE_S
    a suspect: up to `helpers` other members are asked to ping it
      one of them reached it                         ->  alive; only the path from this node fails
      none reached it, or `indirect_timeout_s` is over, or there is no helper
                                                     ->  Dead

So a dead member is noticed within ping_interval + ping_timeout + indirect_timeout: 1.8 s by default. A member
whose process ended is noticed in a fraction of that, because its machine refuses the connection.

When the network splits, each side declares the other dead and continues. `Sync` goes to dead members too: so
both sides meet again, and each member refutes its own death (membership.py).

A node that was paused, or starved of CPU time, has heard nothing from anybody. A gap in its own calls clears
all suspicion (as in Lifeguard: Dadgar, Phillips, Currey, 2018). A member that answers later than
`ping_timeout_s` is declared dead, and refutes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, assert_never

Outcome: TypeAlias = Literal["answered", "refused", "silent"]
FAILURES: Final = 2  # refusals in a row that make a suspect
UPGRADE_S: Final = 10.0  # several times what an upgrade of a node takes


@dataclass(frozen=True)
class Timing:
    """All times follow from `ping_timeout_s` of ClusterConfig, in proportions that SWIM's authors and
    memberlist use. `watched` and `helpers` are counts.
    """

    ping_timeout_s: float = 1.0
    watched: int = 3
    helpers: int = 3

    @property
    def ping_interval_s(self) -> float:
        """From one ping of a member to the next."""
        return 0.3 * self.ping_timeout_s

    @property
    def indirect_timeout_s(self) -> float:
        """For other nodes to reach a suspect."""
        return self.ping_timeout_s / 2

    @property
    def sync_interval_s(self) -> float:
        """From one full exchange with a member, alive or dead, to the next."""
        return self.ping_timeout_s

    @property
    def tick_s(self) -> float:
        """How often the shell should tick."""
        return self.ping_interval_s / 3

    @property
    def pause_s(self) -> float:
        """The longest time between two calls on a node that runs properly."""
        return max(3 * self.tick_s, self.ping_timeout_s / 2)


# --- events


@dataclass(frozen=True)
class Known:
    """The members changed: the version of each member's record, without this node."""

    alive: Mapping[str, int]
    dead: Mapping[str, int]


@dataclass(frozen=True)
class PingEnded:
    """One for each Ping. "refused" stands for every broken connection."""

    node: str
    outcome: Outcome


@dataclass(frozen=True)
class Heard:
    """A message came from the node."""

    node: str


@dataclass(frozen=True)
class Upgrading:
    """The node says that it will be silent for a moment."""

    node: str


@dataclass(frozen=True)
class Asked:
    """The answer to an Ask: whether `helper` reached the node. A silent helper gives none."""

    node: str
    helper: str
    reached: bool


@dataclass(frozen=True)
class Tick:
    pass


Event: TypeAlias = Known | PingEnded | Heard | Upgrading | Asked | Tick

# --- actions


@dataclass(frozen=True)
class Ping:
    node: str


@dataclass(frozen=True)
class Ask:
    """Ask `helper` whether it can reach the node."""

    helper: str
    node: str


@dataclass(frozen=True)
class Dead:
    """Declare it dead, if its record still has this version."""

    node: str
    version: int


@dataclass(frozen=True)
class Sync:
    """Exchange states with the node. A failure means nothing."""

    node: str


Action: TypeAlias = Ping | Ask | Dead | Sync


@dataclass
class _Watched:
    version: int
    heard_s: float
    next_ping_s: float
    pinging: bool = False
    refused: int = 0
    suspect_until_s: float | None = None
    excused_until_s: float = 0.0  # no suspicion before
    asked: set[str] = field(default_factory=set)  # helpers that have not answered yet

    def lives(self, now_s: float) -> None:
        self.heard_s = now_s
        self.refused = 0
        self.suspect_until_s = None
        self.asked.clear()


class Detector:
    """The detector of one node. Call it every `timing.tick_s`, and at every event."""

    def __init__(self, name: str, timing: Timing, now_s: float) -> None:
        self.name = name
        self._timing = timing
        self._alive: dict[str, int] = {}
        self._dead: dict[str, int] = {}
        self._watched: dict[str, _Watched] = {}
        self._last_s = now_s
        self._next_sync_s = now_s
        self._round = 0

    @property
    def watched(self) -> list[str]:
        """The members that this node watches."""
        return list(self._watched)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What to do about the event, in order."""
        if now_s - self._last_s > self._timing.pause_s:
            for watched in self._watched.values():
                watched.lives(now_s)
        self._last_s = now_s
        out: list[Action] = []
        match event:
            case Known():
                self._known(event, now_s, out)
            case PingEnded():
                self._ping_ended(event, now_s, out)
            case Heard():
                self._heard(event, now_s)
            case Upgrading():
                self._upgrading(event, now_s)
            case Asked():
                self._asked(event, now_s, out)
            case Tick():
                self._tick(now_s, out)
            case _:
                assert_never(event)
        return out

    # --- events

    def _known(self, event: Known, now_s: float, out: list[Action]) -> None:
        self._alive, self._dead = dict(event.alive), dict(event.dead)
        chosen = successors(self.name, self._alive)[: self._timing.watched]
        kept = {}
        for node in chosen:
            old = self._watched.get(node)
            if old is not None and old.version != self._alive[node]:
                old.version = self._alive[node]  # the member changed its own record
                old.lives(now_s)
            kept[node] = old or _Watched(self._alive[node], now_s, now_s)
        self._watched = kept
        for watched in kept.values():
            watched.asked &= self._alive.keys()
        self._look(now_s, out)

    def _ping_ended(self, event: PingEnded, now_s: float, out: list[Action]) -> None:
        watched = self._watched.get(event.node)
        if watched is None:
            return
        watched.pinging = False
        if event.outcome == "answered":
            watched.lives(now_s)
        elif event.outcome == "refused":
            watched.refused += 1
            if watched.refused < FAILURES and now_s >= watched.excused_until_s:
                watched.next_ping_s = now_s
        self._look(now_s, out)

    def _heard(self, event: Heard, now_s: float) -> None:
        watched = self._watched.get(event.node)
        if watched is not None:
            watched.lives(now_s)

    def _upgrading(self, event: Upgrading, now_s: float) -> None:
        watched = self._watched.get(event.node)
        if watched is not None:
            watched.lives(now_s)
            watched.excused_until_s = now_s + UPGRADE_S

    def _asked(self, event: Asked, now_s: float, out: list[Action]) -> None:
        watched = self._watched.get(event.node)
        if watched is None or event.helper not in watched.asked:
            return
        if event.reached:
            watched.lives(now_s)
        else:
            watched.asked.discard(event.helper)
            self._look(now_s, out)

    def _tick(self, now_s: float, out: list[Action]) -> None:
        self._look(now_s, out)
        if now_s >= self._next_sync_s:
            self._next_sync_s = now_s + self._timing.sync_interval_s
            self._round += 1
            groups = [group for group in (self._alive, self._dead) if group]
            out += [Sync(_drawn(self.name, self._round, group)) for group in groups]

    # --- deciding

    def _look(self, now_s: float, out: list[Action]) -> None:
        timing = self._timing
        for node, watched in list(self._watched.items()):
            if now_s < watched.excused_until_s:
                watched.refused = 0
            elif watched.suspect_until_s is not None:
                if not watched.asked or now_s >= watched.suspect_until_s:
                    self._dies(node, watched, out)
                    continue
            elif watched.refused >= FAILURES or now_s - watched.heard_s >= timing.ping_timeout_s:
                self._suspect(node, watched, now_s, out)
                if node not in self._watched:
                    continue
            if not watched.pinging and now_s >= watched.next_ping_s:
                watched.pinging = True
                watched.next_ping_s = now_s + timing.ping_interval_s
                out.append(Ping(node))

    def _suspect(self, node: str, watched: _Watched, now_s: float, out: list[Action]) -> None:
        trusted = [
            other
            for other in successors(node, self._alive)
            if other not in self._watched or self._watched[other].suspect_until_s is None
        ]
        helpers = trusted[: self._timing.helpers]
        watched.suspect_until_s = now_s + self._timing.indirect_timeout_s
        watched.asked = set(helpers)
        if helpers:
            out += [Ask(helper, node) for helper in helpers]
        else:
            self._dies(node, watched, out)

    def _dies(self, node: str, watched: _Watched, out: list[Action]) -> None:
        del self._watched[node]
        version = self._alive.pop(node)
        assert version == watched.version
        out.append(Dead(node, version))


def successors(name: str, others: Iterable[str]) -> list[str]:
    """The others in the order of the circle, from the name's own place on."""
    place = _place(name)
    return sorted(
        (other for other in others if other != name),
        key=lambda other: (_place(other) <= place, _place(other)),
    )


def _place(name: str) -> tuple[bytes, str]:
    return hashlib.blake2b(name.encode(), digest_size=8).digest(), name


def _drawn(name: str, round_: int, group: Iterable[str]) -> str:
    """One of the group, as good as random: a hash of this node, this round and each member."""
    return min(group, key=lambda other: _place(f"{name} {round_} {other}"))
