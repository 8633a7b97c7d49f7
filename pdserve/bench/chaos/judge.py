"""From what was written down to the figures. Pure: no clock, no file.

A read may miss while a node is disturbed, and for SETTLE_S afterwards, and as long as its client does not
know that the node is well again, which has a row of its own. The rest is calm. In calm, a page whose commit
was acknowledged must be readable (R4), whoever asks, unless something happened to it that loses pages by its
nature (`Lost`). If its node was killed and restarted since, the read counts for R8 instead. A page that was
said to exist must be readable a moment later (R3).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from pdserve.bench.chaos import pages as p
from pdserve.bench.chaos.records import (
    Abandoned,
    Asked,
    Disturbed,
    Dropped,
    Ended,
    Flipped,
    Lost,
    Moved,
    Noticed,
    Overshot,
    Record,
    Restarted,
    Stopped,
)

SETTLE_S: Final = 2.0  # a client's breaker: 0.5 s to the next probe, 1 s to connect, and a moment
FOUND_WITHIN_S: Final = 10.0
GRACE_S: Final = 1.0  # R12
NOTICED_WITHIN_S: Final = 2.0  # R10
MOVED_SHARE: Final = 1.1  # R11, over 1/(N+1)
MISSED_WHILE_MOVING: Final = 0.01  # R11
Verdict: TypeAlias = Literal["pass", "MISS", "not run"]
R = TypeVar("R")


class Row(msgspec.Struct, frozen=True):
    """One figure. `number` is that of the reliability table, or empty."""

    number: str
    what: str
    goal: str
    figure: str
    verdict: Verdict


def judge(records: Sequence[Record], owner: Callable[[int], str]) -> list[Row]:
    """The figures. `owner(page)`: the node that owned the page when the run began."""
    asked = sorted(_of(records, Asked), key=lambda one: one.start_s)
    calm = Calm(_of(records, Disturbed), _of(records, Stopped))
    kept = read_after_ack(asked, records, calm, owner)
    return [
        _wrong_bytes(asked, _of(records, Flipped)),
        _torn(asked),
        _confirmed(asked, calm),
        _share("R4", "read after the commit was acknowledged", kept.same, 1.0),
        _dropped([one for one in _of(records, Dropped) if not calm.disturbed.touch(one.at_s, one.at_s + 1)]),
        _overshot(_of(records, Overshot)),
        Row(
            "R7", "p99 of a quiet namespace beside a loud one", "≤ 1.3 ×", "`pdserve bench quiet`", "not run"
        ),
        _share("R8", "pages kept over kill -9 and restart", kept.restarted, 0.999, _restarts(records)),
        _noticed(_of(records, Noticed)),
        _moved(_of(records, Moved), kept.moving),
        _late([one for one in asked if calm.ran(one)], _of(records, Ended)),
        Row("R13", "pool dead: time to first token, output", "≤ 1.05 ×", "tests/e2e", "not run"),
        _abandoned(_of(records, Abandoned)),
        _found_again([one for one in asked if calm.ran(one)], calm),
        _ended(_of(records, Ended)),
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

    def __init__(self, disturbed: Iterable[Disturbed], stopped: Iterable[Stopped] = ()) -> None:
        self.disturbed = Spells((one.start_s, one.end_s + SETTLE_S) for one in disturbed)
        spells: dict[str, list[tuple[float, float]]] = {}
        for one in stopped:
            spells.setdefault(one.client, []).append((one.start_s, one.end_s + SETTLE_S))
        self._stopped = {client: Spells(of_client) for client, of_client in spells.items()}

    def over(self, asked: Asked) -> bool:
        """Whether all of the operation was in calm."""
        return asked.up and not self.disturbed.touch(asked.start_s, asked.end_s) and self.ran(asked)

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
    """Reads of acknowledged pages: while pages moved, else by whether the page's node was killed since."""

    same: Count = field(default_factory=Count)
    restarted: Count = field(default_factory=Count)
    moving: Count = field(default_factory=Count)


def read_after_ack(
    asked: Sequence[Asked], records: Sequence[Record], calm: Calm, owner: Callable[[int], str]
) -> Kept:
    """Walk through the run in order of time. A put counts from its end, a read at its start."""
    kills = [one for one in _of(records, Disturbed) if one.kind == "kill"]
    moments: list[tuple[float, int, Asked | Disturbed | Lost]] = []
    for one in asked:
        if one.kind == "put":
            moments.append((one.end_s, 0, one))
        elif one.kind == "get" and calm.over(one):
            moments.append((one.start_s, 1, one))
    moments += [(kill.start_s, 2, kill) for kill in kills]
    moments += [(lost.at_s, 3, lost) for lost in _of(records, Lost)]
    moving = Spells((one.start_s, one.end_s) for one in _of(records, Moved))
    acknowledged: dict[int, bool] = {}  # page: whether its node was killed since
    kept = Kept()
    for _, _, moment in sorted(moments, key=lambda each: each[:2]):
        if isinstance(moment, Lost):
            for page in moment.pages or list(acknowledged):
                acknowledged.pop(page, None)
        elif isinstance(moment, Disturbed):
            for page in acknowledged:
                acknowledged[page] |= owner(page) == moment.node
        elif moment.kind == "put":
            under_it = {kill.node for kill in kills if moment.start_s <= kill.start_s <= moment.end_s}
            for page, ok in zip(moment.pages, moment.ok, strict=True):
                if ok:
                    acknowledged[page] = owner(page) in under_it
        else:
            moves = moving.touch(moment.start_s, moment.end_s)
            for page, ok in zip(moment.pages, moment.ok, strict=True):
                if p.zone_of(page) == p.OWNED and page in acknowledged:
                    by_node = kept.restarted if acknowledged[page] else kept.same
                    (kept.moving if moves else by_node).add(ok)
    return kept


def _wrong_bytes(asked: Sequence[Asked], flips: Sequence[Flipped]) -> Row:
    wrong = sum(len(one.wrong) for one in asked) + sum(flip.outcome == "delivered" for flip in flips)
    read = sum(sum(one.ok) for one in asked if one.kind in ("get", "confirmed"))
    detected = sum(flip.outcome == "detected" for flip in flips)
    possible = sum(flip.outcome != "replaced" for flip in flips)
    figure = f"{wrong} of {read:,}; {detected} of {possible} flips"
    what = "wrong bytes delivered; flipped bits detected"
    if not read:
        return Row("R1", what, "0; 100 %", "nothing was read", "not run")
    return Row("R1", what, "0; 100 %", figure, "pass" if wrong == 0 and detected == possible else "MISS")


def _torn(asked: Sequence[Asked]) -> Row:
    """Pages that nobody damaged and yet are no pages: seen by clients without checksums, or by checksum."""
    torn = sum(
        one.corrupt + len(one.wrong) for one in asked if one.pages and p.zone_of(one.pages[0]) != p.DAMAGED
    )
    writes = sum(len(one.pages) for one in asked if one.kind == "put")
    what, figure = "torn pages visible when a writer dies", f"{torn}, {writes:,} pages written"
    return Row("R2", what, "0", figure, ("MISS" if torn else "pass") if writes else "not run")


def _confirmed(asked: Sequence[Asked], calm: Calm) -> Row:
    failed = Count()
    for one in asked:
        if one.kind == "confirmed" and calm.over(one):
            for page, ok in zip(one.pages, one.ok, strict=True):
                if p.zone_of(page) != p.DAMAGED:
                    failed.add(not ok)
    what, goal = "exists said yes, get failed", "≤ 0.1 %"
    if not failed.all:
        return Row("R3", what, goal, "nothing was asked in calm", "not run")
    share = failed.good / failed.all
    figure = f"{share:.3%}, {failed.good} of {failed.all:,}"
    return Row("R3", what, goal, figure, "pass" if share <= 0.001 else "MISS")


def _share(number: str, what: str, count: Count, goal: float, more: str = "") -> Row:
    goal_text = "100 %" if goal == 1.0 else f"≥ {goal:.1%}"
    if not count.all:
        return Row(number, what, goal_text, "nothing was read in calm", "not run")
    share = count.good / count.all
    figure = f"{share:.3%}, {count.good:,} of {count.all:,}{more}"
    return Row(number, what, goal_text, figure, "pass" if share >= goal else "MISS")


def _restarts(records: Sequence[Record]) -> str:
    restarts = _of(records, Restarted)
    if not restarts:
        return ""
    slowest = max(restarts, key=lambda one: one.after_s)
    return f"; {len(restarts)} restarts, answering after at most {slowest.after_s:.1f} s"


def _dropped(drops: Sequence[Dropped]) -> Row:
    hits = sum(drop.hits_after_1s for drop in drops)
    what = "namespace dropped: reads that succeed after 1 s"
    reads = sum(drop.reads for drop in drops)
    if not reads:
        return Row("R5", what, "0", "none was dropped", "not run")
    return Row("R5", what, "0", f"{hits} of {reads:,}, {len(drops)} drops", "MISS" if hits else "pass")


def _overshot(probes: Sequence[Overshot]) -> Row:
    what = "quota overshoot, reservations included"
    samples = sum(probe.samples for probe in probes)
    if not samples:
        return Row("R6", what, "0 bytes", "none had a quota", "not run")
    over_bytes = max(probe.over_bytes for probe in probes)
    figure = f"{max(0, over_bytes):,} bytes in {samples:,} samples"
    return Row("R6", what, "0 bytes", figure, "MISS" if over_bytes > 0 else "pass")


def _noticed(losses: Sequence[Noticed]) -> Row:
    what = "a node is lost: until the others go on without it"
    if not losses:
        return Row("R10", what, "≤ 2 s", "none was lost", "not run")
    slowest_s = max(loss.after_s for loss in losses)
    figure = f"at most {slowest_s:.2f} s, {len(losses)} losses"
    return Row("R10", what, "≤ 2 s", figure, "pass" if slowest_s <= NOTICED_WITHIN_S else "MISS")


def _moved(moves: Sequence[Moved], reads: Count) -> Row:
    what, goal = "pages moved when one joins N; extra misses meanwhile", "≤ 1.1/(N+1); ≤ 1 %"
    joins = [move for move in moves if move.all_pages]
    if not joins:
        return Row("R11", what, goal, "none joined", "not run")
    over = max(move.moved_pages / move.all_pages * (move.nodes + 1) for move in joins)
    misses = reads.all - reads.good
    share = misses / reads.all if reads.all else 0.0
    figure = f"{over:.2f}/(N+1); {share:.2%}, {misses:,} of {reads.all:,}; {len(joins)} joins"
    good = over <= MOVED_SHARE and share <= MISSED_WHILE_MOVING
    return Row("R11", what, goal, figure, "pass" if good else "MISS")


def _late(asked: Sequence[Asked], ended: Sequence[Ended]) -> Row:
    late = [one for one in asked if one.end_s - one.start_s > one.limit_s + GRACE_S]
    stuck = sum(not one.clean for one in ended if one.name.startswith("client"))
    slowest = max((one.end_s - one.start_s - one.limit_s for one in asked), default=0.0)
    figure = f"{len(late) + stuck} of {len(asked):,}; the latest {slowest:+.2f} s"
    what = "requests later than their deadline + 1 s"
    verdict: Verdict = "not run" if not asked else "MISS" if late or stuck else "pass"
    return Row("R12", what, "0", figure, verdict)


def _abandoned(clients: Sequence[Abandoned]) -> Row:
    what = "bytes reserved 30 s after a client was killed"
    if not clients:
        return Row("R14", what, "0", "none was killed", "not run")
    left = sum(one.left_bytes for one in clients)
    slowest = max(one.after_s for one in clients)
    held = sum(one.reserved_bytes for one in clients)
    figure = f"{left} of {held:,}, {len(clients)} killed; free after at most {slowest:.1f} s"
    return Row("R14", what, "0", figure, "MISS" if left else "pass")


def _found_again(asked: Sequence[Asked], calm: Calm) -> Row:
    """How long after a disturbance each client thought that a node is away."""
    slowest_s = 0.0
    starts = [one.start_s for one in asked]
    for end_s, next_s in calm.stretches():
        window = asked[bisect_left(starts, end_s) : bisect_left(starts, next_s)]
        found: dict[str, float] = {}
        for one in window:
            if one.up:
                found.setdefault(one.worker, one.start_s)
        for one in window[-1:]:
            if {other.worker for other in window} - set(found):
                found[""] = one.start_s  # some client never did: at least as long as this
        slowest_s = max([slowest_s, *(at_s - end_s for at_s in found.values())])
    what, goal = "until clients use a node again after a fault", f"≤ {FOUND_WITHIN_S:.0f} s"
    if not asked:
        return Row("-", what, goal, "nothing was asked", "not run")
    verdict: Verdict = "pass" if slowest_s <= FOUND_WITHIN_S else "MISS"
    return Row("-", what, goal, f"at most {slowest_s:.1f} s", verdict)


def _ended(ended: Sequence[Ended]) -> Row:
    bad = [one for one in ended if not one.clean or one.complaint]
    figure = "; ".join(f"{one.name}: {one.complaint or 'did not end'}" for one in bad[:3])
    what = "nodes and clients that ended badly, or lost count of their pages"
    return Row("", what, "0", figure or f"0 of {len(ended)}", "MISS" if bad else "pass")


def _of(records: Iterable[Record], kind: type[R]) -> list[R]:
    return [one for one in records if isinstance(one, kind)]
