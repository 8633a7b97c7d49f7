"""What is changed and counted of a scheduler's fetches, beside scripted parts of SGLang's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.sglang.children.fetches import LOOKUP_S, MOST, PULL_ID, READ_S, Declined, Fetches


@dataclass
class Operation:
    """SGLang's of a request, and what says that its pages are there."""

    request_id: str
    storage_hit_count: int
    completed_req: bool = True

    @property
    def operation(self) -> Operation:
        return self


@dataclass
class Answers:
    """A queue, its condition, and a thread that answers while the scheduler waits."""

    come: bool = True
    coming: list[Operation] = field(default_factory=list)
    queue: deque[Operation] = field(default_factory=deque)
    waits_s: list[float] = field(default_factory=list)

    @property
    def not_empty(self) -> Answers:
        return self

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        if not predicate():
            self.waits_s.append(timeout_s)
            if self.come:
                self.bring()
        return predicate()

    def bring(self) -> None:
        self.queue.extend(self.coming)
        self.coming.clear()


class Scheduler:
    """SGLang's scheduler, cache and cache controller. `stored`: tokens in the pool, by request."""

    def __init__(self, **stored: int) -> None:
        self.tree_cache = self.cache_controller = self
        self.prefetch_hit_queue, self.ack_prefetch_queue = Answers(), Answers()
        self.stored = stored
        self.loaded: dict[str, int] = {}
        self.ongoing: set[str] = set()
        self.admitted: list[tuple[str, int]] = []
        self.now_s, self.step_s = 0.0, 1.0
        self.fetches = Fetches(
            lambda outcome, steps: self.admitted.append((outcome, steps)), lambda: self.now_s
        )
        self._ask, self._step, self._pop = (
            self.fetches.asked(Scheduler.prefetch),
            self.fetches.stepped(Scheduler.events),
            self.fetches.admitted(Scheduler.pop),
        )

    def has_ongoing_prefetch(self, request: str) -> bool:
        return request in self.ongoing

    def prefetch(self, request: str) -> None:
        if request in self.stored and request not in self.ongoing:
            self.ongoing.add(request)
            self.prefetch_hit_queue.coming.append(Operation(request, self.stored[request]))

    def events(self) -> None:
        """What has been read is there, and what has been answered is read."""
        there = [*self.ack_prefetch_queue.queue]
        self.ack_prefetch_queue.queue.clear()
        for answer in self.prefetch_hit_queue.queue:
            (self.ack_prefetch_queue.coming if answer.storage_hit_count else there).append(answer)
        self.prefetch_hit_queue.queue.clear()
        for one in there:
            self.ongoing.discard(one.request_id)
            self.loaded[one.request_id] = one.storage_hit_count

    def pop(self, request: str) -> tuple[int, int | None]:
        return self.loaded.pop(request, 0), None

    def step(self, *came: str) -> None:
        for request in came:
            self._ask(self, request)
        self.now_s += self.step_s
        self._step(self)
        for request in [*self.loaded]:
            self._pop(self, request)


def test_a_step_waits_for_answers_about_requests_that_came_with_it_and_for_their_pages() -> None:
    scheduler = Scheduler(hit=64, miss=0)
    scheduler.step("hit", "unasked")
    assert scheduler.prefetch_hit_queue.waits_s == [LOOKUP_S]
    assert scheduler.ack_prefetch_queue.waits_s == [READ_S]
    assert scheduler.admitted == [("hit", 0)]
    scheduler.step("miss")
    assert scheduler.ack_prefetch_queue.waits_s == [READ_S]
    assert scheduler.admitted[1:] == [("miss", 0)]


def test_pages_are_waited_for_no_longer_than_the_step_before_took() -> None:
    scheduler = Scheduler(hit=64)
    scheduler.step_s = READ_S / 2
    scheduler.step("hit")
    assert scheduler.ack_prefetch_queue.waits_s == [READ_S / 2]


def test_a_pool_that_does_not_answer_costs_each_request_one_wait_and_a_step() -> None:
    scheduler = Scheduler(hit=64)
    answers, read = scheduler.prefetch_hit_queue, scheduler.ack_prefetch_queue
    answers.come = False
    scheduler.step("hit")
    scheduler.step("hit")  # it is asked for already
    answers.bring()
    scheduler.step()
    read.bring()
    scheduler.step()
    assert (answers.waits_s, read.waits_s) == ([LOOKUP_S], [])
    assert scheduler.admitted == [("hit", 3)]


def test_pages_that_come_late_are_there_in_a_later_step_and_those_of_a_pull_are_not_waited_for() -> None:
    scheduler = Scheduler(**{"hit": 64, PULL_ID: 64})
    read = scheduler.ack_prefetch_queue
    read.come = False
    scheduler.step("hit")
    read.bring()
    scheduler.step(PULL_ID)
    assert read.waits_s == [READ_S]
    read.bring()
    scheduler.step()
    assert scheduler.admitted == [("hit", 1), ("hit", 1)]


def test_requests_that_were_aborted_are_forgotten() -> None:
    scheduler = Scheduler(**{str(n): 64 for n in range(MOST + 2)})
    scheduler.step(*scheduler.stored)
    assert len(scheduler.admitted) == MOST


def test_what_sglangs_counts_gain_is_added_by_reason() -> None:
    counts = {"attempts": 9, "declined_rate_limited": 0, "declined_host_oversize": 0}
    added: list[tuple[str, int]] = []
    read = Declined(lambda reason, count: added.append((reason, count))).counted(lambda _: dict(counts))
    assert read(None) == counts
    assert added == [("others_under_way", 0), ("larger_than_host_memory", 0)]  # shown before the first
    added.clear()
    counts |= {"declined_rate_limited": 2, "declined_host_oversize": 1}
    assert read(None) == read(None) == counts
    assert added == [("others_under_way", 2), ("larger_than_host_memory", 1)]
    counts["declined_rate_limited"] = 1  # SGLang started anew
    read(None)
    counts["declined_rate_limited"] = 3
    read(None)
    assert added[2:] == [("others_under_way", 2)]
