"""From the records of a chaos run to its figures. Pure: no clock, no file.

A read may miss while a node is disturbed, and for SETTLE_S afterwards, and as long as its client does not
know that the node is well again, which has a row of its own. The rest is calm. In calm, a page whose commit
was acknowledged must be readable (R4), whoever asks, unless something happened to it that loses pages by its
nature (`Lost`). If its node was killed and restarted since, the read counts for R8 instead. A page that was
said to exist must be readable a moment later (R3). Upgrades are no disturbance.

A figure comes from what the run did; where it did nothing that could have shown a failure, the row says "not
exercised".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from tests.chaos.records import (
    Abandoned,
    Acted,
    Asked,
    Disturbed,
    Ended,
    Flipped,
    Lost,
    Moved,
    Record,
    Restarted,
    Starved,
    Stopped,
    Upgraded,
)
from tests.support.kvpool import made_pages as p

R = TypeVar("R")
Verdict: TypeAlias = Literal["pass", "MISS", "not exercised"]
FOUND_WITHIN_S: Final = 10.0
GRACE_S: Final = 1.0  # R12
HIT_WITHIN_S: Final = 10.0  # how fast it is when nothing else runs is a measurement
MOVED_SHARE: Final = 1.1  # R11, over 1/(N+1)
MISSED_WHILE_MOVING: Final = 0.01  # R11
SETTLE_S: Final = 2.0  # a client's breaker: 0.5 s to the next probe, 1 s to connect, and a moment
ON_SSD_AFTER_S: Final = (
    2.0  # from the acknowledgement until a page must survive that its node loses its memory
)


class Row(msgspec.Struct, frozen=True):
    """One figure. `number` is that of the reliability goals, or a word."""

    number: str
    what: str
    goal: str
    figure: str
    verdict: Verdict


def judge(records: Sequence[Record], owner: Callable[[int], str], restart_wait_s: float) -> list[Row]:
    """The figures. `owner(page)`: the node that owned the page when the run began. `restart_wait_s`: how much
    longer an operation may take while a node is being upgraded.
    """
    asked = sorted(of(records, Asked), key=lambda one: one.start_s)
    calm = Calm(records)
    ran = [one for one in asked if calm.ran(one)]
    kept = read_after_ack(asked, records, calm, owner)
    return [
        _wrong_bytes(asked, records),
        _detected(of(records, Flipped)),
        _torn(asked, records),
        _confirmed(asked, records, calm),
        _share("R4", "read after the commit was acknowledged", kept.same, 1.0),
        _share("R8", "pages kept over kill -9 and restart", kept.restarted, 0.999),
        _hit_again(of(records, Restarted)),
        _upgraded(records, kept.upgrading, others_under_upgrade(asked, records, calm)),
        _moved(of(records, Moved)),
        _missed_while_moving(kept.moving),
        _late(ran, records, restart_wait_s),
        _abandoned(of(records, Abandoned)),
        _share("reboot", "pages back from SSD after a reboot", kept.rebooted, 0.999),
        _found_again(ran, calm),
        _failed(of(records, Acted)),
        _ended(of(records, Ended)),
    ]


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


# --- rows


def starved_s(records: Sequence[Record]) -> float:
    """For so long some node waited for a processor."""
    spells = Spells((one.start_s, one.end_s) for one in of(records, Disturbed) if one.kind == "starved")
    return sum(end_s - start_s for start_s, end_s in zip(spells.starts, spells.ends, strict=True))


def _not(number: str, what: str, goal: str, why: str) -> Row:
    return Row(number, what, goal, why, "not exercised")


def _row(number: str, what: str, goal: str, figure: str, good: bool) -> Row:
    return Row(number, what, goal, figure, "pass" if good else "MISS")


def _wrong_bytes(asked: Sequence[Asked], records: Sequence[Record]) -> Row:
    what = "wrong bytes delivered"
    faults = sum(one.kind != "starved" for one in of(records, Disturbed))
    faults += len(of(records, Stopped)) + len(of(records, Flipped))
    read = sum(sum(one.ok) for one in asked if one.kind in ("get", "confirmed"))
    if not read or not faults:
        return _not("R1", what, "0", f"{read:,} pages read under {faults} faults")
    wrong = sum(len(one.wrong) for one in asked)
    wrong += sum(flip.outcome == "delivered" for flip in of(records, Flipped))
    return _row("R1", what, "0", f"{wrong} of {read:,}, {faults} faults", wrong == 0)


def _detected(flips: Sequence[Flipped]) -> Row:
    what, goal = "flipped bits detected, in memory; on SSD", "100 %"
    judged = [flip for flip in flips if flip.outcome != "replaced"]
    if not judged:
        return _not("R1", what, goal, "none was read")
    parts = []
    for where in ("memory", "ssd"):
        here = [flip.outcome == "detected" for flip in judged if flip.where == where]
        parts.append(f"{sum(here)} of {len(here)}")
    return _row("R1", what, goal, "; ".join(parts), all(flip.outcome == "detected" for flip in judged))


def _torn(asked: Sequence[Asked], records: Sequence[Record]) -> Row:
    """Pages that nobody damaged and yet are no pages: seen by clients without checksums, or by checksum.
    Writers that die when nobody reads any more show nothing.
    """
    what = "torn pages visible when a writer dies"
    last_s = max((one.start_s for one in asked if one.kind == "get"), default=0.0)
    deaths = sum(one.killed and one.start_s < last_s for one in of(records, Stopped))
    deaths += sum(one.at_s < last_s for one in of(records, Abandoned) if one.reserved_bytes)
    writes = sum(len(one.pages) for one in asked if one.kind == "put")
    if not deaths or not writes:
        return _not("R2", what, "0", f"{writes:,} pages written, {deaths} writers killed")
    torn = sum(
        one.corrupt + len(one.wrong) for one in asked if one.pages and p.zone_of(one.pages[0]) != p.DAMAGED
    )
    figure = f"{torn}, {writes:,} pages written, {deaths} writers killed"
    return _row("R2", what, "0", figure, torn == 0)


def _confirmed(asked: Sequence[Asked], records: Sequence[Record], calm: Calm) -> Row:
    failed, upgrading = Count(), upgrades(records)
    for one in asked:
        if one.kind == "confirmed" and calm.over(one) and not upgrading.touch(one.start_s, one.end_s):
            for page, ok in zip(one.pages, one.ok, strict=True):
                if p.zone_of(page) != p.DAMAGED:
                    failed.add(not ok)
    what, goal = "exists said yes, get failed", "≤ 0.1 %"
    if not failed.all:
        return _not("R3", what, goal, "nothing was asked in calm")
    share = failed.good / failed.all
    return _row("R3", what, goal, f"{share:.3%}, {failed.good} of {failed.all:,}", share <= 0.001)


def _share(number: str, what: str, count: Count, goal: float) -> Row:
    goal_text = "100 %" if goal == 1.0 else f"≥ {goal:.1%}"
    if not count.all:
        return _not(number, what, goal_text, "none was read in calm")
    share = count.good / count.all
    return _row(number, what, goal_text, f"{share:.3%}, {count.good:,} of {count.all:,}", share >= goal)


def _hit_again(restarts: Sequence[Restarted]) -> Row:
    what, goal = "a node that was restarted gives a page again", f"≤ {HIT_WITHIN_S:.0f} s"
    judged = [one for one in restarts if one.asked]
    if not judged:
        return _not("R8", what, goal, "none was restarted with pages")
    times = sorted(inf if one.hit_s is None else one.hit_s for one in judged)
    never, pages = times.count(inf), max(one.pages for one in judged)
    figure = f"{times[len(times) // 2]:.2f} s in the middle, at most {times[-1]:.2f} s"
    figure = f"{never} without a hit" if never else figure
    figure += f"; {len(judged)} restarts, {pages:,} pages"
    return _row("R8", what, goal, figure, times[-1] <= HIT_WITHIN_S)


def _upgraded(records: Sequence[Record], reads: Count, others: Count) -> Row:
    what, goal = "rolling upgrade: failed requests; lost pages", "0; 0"
    done = of(records, Upgraded)
    errors = [one.error for one in done if one.error]
    if not errors and not (done and reads.all):
        return _not("R9", what, goal, f"{len(done)} nodes upgraded, {reads.all} pages read meanwhile")
    failed, asked = reads.all - reads.good + others.all - others.good, reads.all + others.all
    lost, pages = sum(one.lost for one in done), sum(one.pages for one in done)
    figure = f"{failed} of {asked:,}; {lost} of {pages:,}; {len(done)} upgrades"
    figure += f", {len(errors)} failed" if errors else ""
    return _row("R9", what, goal, "; ".join([figure, *errors[:1]]), not (failed or lost or errors))


def _moved(moves: Sequence[Moved]) -> Row:
    what, goal = "pages moved when one joins N", f"≤ {MOVED_SHARE}/(N+1)"
    joins = [move for move in moves if move.all_pages]
    errors = [move.error for move in moves if move.error]
    if errors:
        figure = f"{len(errors)} of {len(joins) + len(errors)} joins failed; {errors[0]}"
        return _row("R11", what, goal, figure, False)
    if not joins:
        return _not("R11", what, goal, "none joined")
    fair = sum(move.all_pages / (move.nodes + 1) for move in joins)
    over = sum(move.moved_pages for move in joins) / fair
    figure = f"{over:.2f}/(N+1) of {sum(move.all_pages for move in joins):,}, {len(joins)} joins"
    return _row("R11", what, goal, figure, over <= MOVED_SHARE)


def _missed_while_moving(reads: Count) -> Row:
    what, goal = "misses while pages move", f"≤ {MISSED_WHILE_MOVING:.0%}"
    if not reads.all:
        return _not("R11", what, goal, "nothing was read meanwhile")
    misses = reads.all - reads.good
    share = misses / reads.all
    return _row("R11", what, goal, f"{share:.2%}, {misses:,} of {reads.all:,}", share <= MISSED_WHILE_MOVING)


def _late(asked: Sequence[Asked], records: Sequence[Record], restart_wait_s: float) -> Row:
    what = "requests later than their deadline + 1 s"
    if not asked or not any(not isinstance(one, Acted | Asked | Ended | Starved) for one in records):
        return _not("R12", what, "0", f"{len(asked):,} requests, no fault")
    upgrading = upgrades(records)
    over_s = [
        one.end_s - one.start_s - one.limit_s - restart_wait_s * upgrading.touch(one.start_s, one.end_s)
        for one in asked
    ]
    late = sum(over > GRACE_S for over in over_s)
    stuck = sum(not one.clean for one in of(records, Ended) if one.name.startswith("client"))
    figure = f"{late + stuck} of {len(asked):,}; the latest {max(over_s):+.2f} s"
    starved = len(of(records, Starved))
    figure += f"; {starved} times a client got no processor" if starved else ""
    return _row("R12", what, "0", figure, not (late or stuck))


def _abandoned(clients: Sequence[Abandoned]) -> Row:
    what = "bytes reserved 30 s after a client was killed"
    held = sum(one.reserved_bytes for one in clients)
    if not held:
        return _not("R14", what, "0", "none was killed that held any")
    left = sum(one.left_bytes for one in clients)
    slowest = max(one.after_s for one in clients)
    killed = sum(one.reserved_bytes > 0 for one in clients)
    figure = f"{left} of {held:,}, {killed} killed; free after at most {slowest:.1f} s"
    return _row("R14", what, "0", figure, left == 0)


def _found_again(asked: Sequence[Asked], calm: Calm) -> Row:
    """How long after a disturbance each client thought that a node is away."""
    slowest_s, judged = 0.0, 0
    starts = [one.start_s for one in asked]
    for end_s, next_s in calm.stretches():
        window = asked[bisect_left(starts, end_s) : bisect_left(starts, next_s)]
        judged += bool(window)
        found: dict[str, float] = {}
        for one in window:
            if one.up:
                found.setdefault(one.worker, one.start_s)
        for one in window[-1:]:
            if {other.worker for other in window} - set(found):
                found[""] = one.start_s  # some client never did: at least as long as this
        slowest_s = max([slowest_s, *(at_s - end_s for at_s in found.values())])
    what, goal = "until clients use a node again after a fault", f"≤ {FOUND_WITHIN_S:.0f} s"
    if not judged:
        return _not("found", what, goal, "nothing was disturbed")
    return _row(
        "found", what, goal, f"at most {slowest_s:.1f} s, {judged} times", slowest_s <= FOUND_WITHIN_S
    )


def _failed(acted: Sequence[Acted]) -> Row:
    """A fault that was left out is none that failed: it was not possible then."""
    what = "faults that failed"
    tried = sum(one.became != "left out" for one in acted)
    failed = [one for one in acted if one.became == "failed"]
    left_out = f"{len(acted) - tried} more left out"
    if not tried:
        return _not("faults", what, "0", f"none was tried, {left_out}")
    named = [f"{one.kind} {one.node}: {one.why}" for one in failed[:3]]
    return _row("faults", what, "0", "; ".join([f"{len(failed)} of {tried}, {left_out}", *named]), not failed)


def _ended(ended: Sequence[Ended]) -> Row:
    what = "nodes and clients that ended badly, or lost count of their pages"
    if not ended:
        return _not("ended", what, "0", "none ended")
    bad = [one for one in ended if not one.clean or one.complaint]
    figure = "; ".join(f"{one.name}: {one.complaint or 'did not end'}" for one in bad[:3])
    return _row("ended", what, "0", figure or f"0 of {len(ended)}", not bad)
