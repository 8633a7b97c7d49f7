"""What is changed and counted of a scheduler's fetches, beside scripted parts of SGLang's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.sglang.children.fetches import LOOKUP_S, MOST, Declined, Fetches


@dataclass
class Answers:
    """A queue, its condition, and a thread that answers while the scheduler waits."""

    come: int = 1
    queue: deque[str] = field(default_factory=deque)
    waits_s: list[float] = field(default_factory=list)

    @property
    def not_empty(self) -> Answers:
        return self

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        assert not predicate()
        self.waits_s.append(timeout_s)
        self.queue.extend(["answer"] * self.come)
        return predicate()


class Scheduler:
    """SGLang's scheduler, cache and cache controller. `stored`: tokens in the pool, by request."""

    def __init__(self, **stored: int) -> None:
        self.tree_cache = self.cache_controller = self
        self.prefetch_hit_queue = Answers()
        self.stored = stored
        self.loaded: dict[str, int] = {}
        self.ongoing: dict[str, bool] = {}  # whether its pages are being read
        self.admitted: list[tuple[str, int]] = []
        self.fetches = Fetches(lambda outcome, steps: self.admitted.append((outcome, steps)))
        self._ask, self._step, self._pop = (
            self.fetches.asked(Scheduler.prefetch),
            self.fetches.stepped(Scheduler.events),
            self.fetches.admitted(Scheduler.pop),
        )

    def has_ongoing_prefetch(self, request: str) -> bool:
        return request in self.ongoing

    def prefetch(self, request: str) -> None:
        if request in self.stored:
            self.ongoing.setdefault(request, False)

    def events(self) -> None:
        """What has been read is there, and what has been answered is read."""
        for request, is_read in list(self.ongoing.items()):
            if is_read or not self.stored[request]:
                del self.ongoing[request]
                self.loaded[request] = self.stored[request]
            elif self.prefetch_hit_queue.queue:
                self.prefetch_hit_queue.queue.popleft()
                self.ongoing[request] = True

    def pop(self, request: str) -> tuple[int, int | None]:
        return self.loaded.pop(request, 0), None

    def step(self, *came: str) -> None:
        for request in came:
            self._ask(self, request)
        self._step(self)
        for request in [*self.loaded]:
            self._pop(self, request)


def test_a_step_waits_for_the_answers_about_requests_that_came_with_it_and_pages_are_there_in_the_next() -> (
    None
):
    scheduler = Scheduler(hit=64, miss=0)
    scheduler.step("hit", "unasked")
    scheduler.step()
    assert scheduler.prefetch_hit_queue.waits_s == [LOOKUP_S]
    assert scheduler.admitted == [("hit", 1)]
    scheduler.step("miss", "hit")
    scheduler.step("hit")  # it is asked for already
    assert len(scheduler.prefetch_hit_queue.waits_s) == 2
    assert scheduler.admitted[1:] == [("miss", 0), ("hit", 1)]


def test_a_pool_that_does_not_answer_costs_each_request_one_wait_and_a_step() -> None:
    scheduler = Scheduler(hit=64)
    answers = scheduler.prefetch_hit_queue
    answers.come = 0
    scheduler.step("hit")
    scheduler.step()
    answers.queue.append("answer")
    scheduler.step()
    scheduler.step()
    assert answers.waits_s == [LOOKUP_S]
    assert scheduler.admitted == [("hit", 3)]


def test_requests_that_were_aborted_are_forgotten() -> None:
    scheduler = Scheduler(**{str(n): 64 for n in range(MOST + 2)})
    scheduler.step(*scheduler.stored)
    scheduler.loaded = dict.fromkeys(scheduler.stored, 64)
    scheduler.step()
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
