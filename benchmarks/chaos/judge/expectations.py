"""When nothing was disturbed, and which pages had to be readable then. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeVar

from benchmarks.chaos import pages as p
from benchmarks.chaos.records import Asked, Disturbed, Lost, Moved, Record, Starved, Stopped, Upgraded

SETTLE_S: Final = 2.0  # a client's breaker: 0.5 s to the next probe, 1 s to connect, and a moment
ON_SSD_AFTER_S: Final = (
    2.0  # from the acknowledgement until a page must survive that its node loses its memory
)
R = TypeVar("R")


class Spells:
    """Stretches of time [start, end], overlapping ones made one."""

    def __init__(self, spells: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []  # both ascending, and disjoint
        for start_s, end_s in sorted(spells):
            if self.ends and start_s <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end_s)
            else:
                self.starts.append(start_s)
                self.ends.append(end_s)

    def touch(self, start_s: float, end_s: float) -> bool:
        before = bisect_right(self.starts, end_s) - 1
        return before >= 0 and self.ends[before] >= start_s


class Calm:
    """When nothing was disturbed, and a client ran."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.disturbed = Spells((one.start_s, one.end_s + SETTLE_S) for one in of(records, Disturbed))
        spells: dict[str, list[tuple[float, float]]] = {}
        stopped: list[Stopped | Starved] = [*of(records, Stopped), *of(records, Starved)]
        for one in stopped:
            spells.setdefault(one.client, []).append((one.start_s, one.end_s + SETTLE_S))
        self._stopped = {client: Spells(of_client) for client, of_client in spells.items()}

    def over(self, asked: Asked) -> bool:
        """Whether all of the operation was in calm, as its client saw it."""
        return asked.up and self.really_over(asked)

    def really_over(self, asked: Asked) -> bool:
        """The same, whatever its client thought of the nodes."""
        return not self.disturbed.touch(asked.start_s, asked.end_s) and self.ran(asked)

    def ran(self, asked: Asked) -> bool:
        """Whether its client ran all the time, and for long enough before."""
        stopped = self._stopped.get(asked.worker.partition(".")[0])
        return stopped is None or not stopped.touch(asked.start_s, asked.end_s)

    def stretches(self) -> Iterator[tuple[float, float]]:
        """From the end of each disturbance to the start of the next."""
        for index, end_s in enumerate(self.disturbed.ends):
            yield end_s - SETTLE_S, [*self.disturbed.starts[index + 1 : index + 2], inf][0]


@dataclass
class Count:
    """So many of so many."""

    good: int = 0
    all: int = 0

    def add(self, good: bool) -> None:
        self.good += good
        self.all += 1


@dataclass
class Kept:
    """Reads of acknowledged pages: while nodes were upgraded, while pages moved, else by what the page's node
    went through since.
    """

    same: Count = field(default_factory=Count)
    restarted: Count = field(default_factory=Count)
    rebooted: Count = field(default_factory=Count)
    moving: Count = field(default_factory=Count)
    upgrading: Count = field(default_factory=Count)


@dataclass(slots=True)
class _Page:
    since_s: float  # acknowledged
    fate: Count | None  # where reads of it count; None: it need not be there


def read_after_ack(
    asked: Sequence[Asked], records: Sequence[Record], calm: Calm, owner: Callable[[int], str]
) -> Kept:
    """Walk through the run in order of time. A put counts from its end, a read at its start."""
    kills = [one for one in of(records, Disturbed) if one.kind in ("kill", "reboot")]
    moving = Spells((one.start_s, one.end_s) for one in of(records, Moved))
    upgrading = upgrades(records)
    moments: list[tuple[float, int, Asked | Disturbed | Lost]] = []
    for one in asked:
        if one.kind == "put":
            moments.append((one.end_s, 0, one))
        elif one.kind == "get" and (calm.over(one) or _under(upgrading, one, calm)):
            moments.append((one.start_s, 1, one))
    moments += [(kill.start_s, 2, kill) for kill in kills]
    moments += [(lost.at_s, 3, lost) for lost in of(records, Lost)]
    kept = Kept()
    pages: dict[int, _Page] = {}  # acknowledged
    for _, _, moment in sorted(moments, key=lambda each: each[:2]):
        if isinstance(moment, Lost):
            for page in moment.pages or list(pages):
                pages.pop(page, None)
        elif isinstance(moment, Disturbed):
            _killed(moment, pages, kept, owner)
        elif moment.kind == "put":
            for page, ok in zip(moment.pages, moment.ok, strict=True):
                if ok:
                    pages[page] = _Page(moment.end_s, kept.same)
            for kill in kills:
                if moment.start_s <= kill.start_s <= moment.end_s:
                    _killed(kill, {page: pages[page] for page in moment.pages if page in pages}, kept, owner)
        else:
            now: Count | None = None
            if upgrading.touch(moment.start_s, moment.end_s):
                now = kept.upgrading
            elif moving.touch(moment.start_s, moment.end_s):
                now = kept.moving
            for page, ok in zip(moment.pages, moment.ok, strict=True):
                if p.zone_of(page) == p.OWNED and page in pages:
                    fate = pages[page].fate
                    if fate is not None:
                        (now or fate).add(ok)
    return kept


def _killed(kill: Disturbed, pages: dict[int, _Page], kept: Kept, owner: Callable[[int], str]) -> None:
    """A node lost its process, perhaps its memory."""
    for number, page in list(pages.items()):
        if owner(number) != kill.node:
            continue
        if kill.kind != "reboot":
            page.fate = kept.restarted if page.fate is kept.same else page.fate
        elif page.since_s > kill.start_s - ON_SSD_AFTER_S:
            page.fate = None
        elif page.fate is not None:
            page.fate = kept.rebooted


def upgrades(records: Iterable[Record]) -> Spells:
    """When nodes were upgraded, and clients still found them again."""
    return Spells((one.start_s, one.end_s + SETTLE_S) for one in of(records, Upgraded))


def others_under_upgrade(asked: Iterable[Asked], records: Sequence[Record], calm: Calm) -> Count:
    """While nodes were upgraded: pages that were to be written, or said to exist; and how it went."""
    count, spells = Count(), upgrades(records)
    for one in asked:
        if one.kind in ("put", "confirmed") and _under(spells, one, calm):
            for page, ok in zip(one.pages, one.ok, strict=True):
                if one.kind == "put" or p.zone_of(page) != p.DAMAGED:
                    count.add(ok)
    return count


def _under(spells: Spells, asked: Asked, calm: Calm) -> bool:
    return spells.touch(asked.start_s, asked.end_s) and calm.really_over(asked)


def of(records: Iterable[Record], kind: type[R]) -> list[R]:
    """Those of one kind."""
    return [one for one in records if isinstance(one, kind)]
