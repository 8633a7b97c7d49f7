from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker, WorkerInfo, WorkerLoad

GEOMETRY = {"layers": 2, "dtype": "float32"}


def info(role: str = "decode", **fields: Any) -> WorkerInfo:
    base: dict[str, Any] = {
        "role": role,
        "model": "m",
        "page_size": 16,
        "namespace": "ns",
        "kv_geometry": GEOMETRY,
        "context_length": 4096,
        "tokenizer": "f00d",
        "chat_template": "beef",
    }
    return WorkerInfo(**(base | fields))


def make(*roles: Any) -> Fleet:
    fleet = Fleet((Worker(role, f"http://h{i}:1") for i, role in enumerate(roles)), circuit_failures=2)
    for worker in fleet.workers:
        assert fleet.on_info(worker, info(worker.role)) is None
        fleet.on_probe_ready(worker)
    return fleet


def test_a_worker_that_breaks_off_its_streams_is_given_few_of_them_however_many_there_are() -> None:
    fleet = make("decode", "decode")
    bad, _ = fleet.workers
    events: list[tuple[float, int, int]] = [(n / 40, n, 0) for n in range(60 * 40)]
    trials: dict[int, int] = {}
    while events:
        now_s, request, step = heapq.heappop(events)
        if step == 0:
            worker = min(fleet.snapshot("m", now_s).decode, key=lambda one: one.in_flight)
            trial = fleet.on_selected(worker, now_s)
            if worker is bad:  # its first token comes 0.3 s later, its end another 0.5 s later
                trials[request] = trial
                heapq.heappush(events, (now_s + 0.3, request, 1))
        elif step == 1:
            fleet.on_trial_answering(bad, trials[request], now_s)
            heapq.heappush(events, (now_s + 0.5, request, 2))
        else:
            fleet.on_released(bad)
            fleet.on_failure(bad, now_s)
    assert 12 < len(trials) < 100  # of 2,400


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"page_size": 32}, "page_size (32 and 16)"),
        ({"kv_geometry": {"layers": 3, "dtype": "float32"}}, "kv_geometry.layers (3 and 2)"),
        ({"kv_geometry": {"layers": 2}}, "kv_geometry.dtype"),
        ({"namespace": "other"}, "namespace"),
        ({"tasks": ("embed",)}, "tasks"),
        ({"model": "m2"}, "model ('m2' and 'm')"),
        ({"tokenizer": "cafe"}, "tokenizer ('cafe' and 'f00d')"),
        ({"chat_template": "none"}, "chat template ('none' and 'beef')"),
    ],
)
def test_a_worker_whose_pages_differ_is_refused(fields: dict[str, Any], named: str) -> None:
    fleet = Fleet([Worker("prefill", "http://a:1"), Worker("decode", "http://b:1")])
    first, second = fleet.workers
    assert fleet.on_info(first, info("prefill")) is None
    refused = fleet.on_info(second, info(**fields))
    assert refused is not None
    assert named in refused
    assert "a:1" in refused
    assert "b:1" in refused
    fleet.on_probe_ready(second)
    assert fleet.snapshot("m", 0).decode == ()
    assert fleet.models == ("m",)
    assert fleet.on_info(second, info()) is None


def test_who_says_nothing_of_its_tokenizer_may_join_and_whoever_is_away_keeps_nobody_out() -> None:
    fleet = make("prefill", "decode")
    prefill, decode = fleet.workers
    assert fleet.on_info(decode, info(tokenizer="", chat_template="", context_length=1024)) is None
    assert fleet.context_length("m") == 1024, "what every worker takes"
    wrong = fleet.on_info(prefill, info("decode"))
    assert wrong is not None
    assert "listed under 'prefill'" in wrong
    for worker in fleet.workers:
        fleet.on_probe_not_ready(worker)
    new = fleet.members.join("http://new:1", "decode")
    assert fleet.on_info(new, info(page_size=32)) is None
    fleet.on_probe_ready(new)
    refused = fleet.on_info(decode, info())  # it comes back as it was
    assert refused is not None
    assert "page_size (16 and 32)" in refused


def join(fleet: Fleet, url: str, role: Any = "decode") -> Worker:
    worker = fleet.members.join(url, role)
    assert fleet.on_info(worker, info(role)) is None
    fleet.on_probe_ready(worker)
    return worker


def test_a_worker_that_leaves_is_out_at_once_and_its_requests_are_counted_to_their_end() -> None:
    fleet = make("decode", "decode")
    leaving, other = fleet.workers
    fleet.on_selected(leaving, 0.0)
    assert fleet.members.leave(leaving.id) is leaving
    assert fleet.snapshot("m", 0).decode == (other,)
    fleet.on_failure(leaving, 0.0)
    fleet.on_released(leaving)
    assert leaving.in_flight == 0
    again = join(fleet, leaving.url)
    assert again is not leaving
    assert fleet.snapshot("m", 0).decode == (other, again)
    fleet.members.leave(again.id)
    fleet.members.take({})  # the order has ended
    assert fleet.by_id[again.id] not in (leaving, again)


@pytest.mark.parametrize(
    ("code", "act"),
    [
        ("bad_url", lambda fleet: fleet.members.join("ftp://h:1", "decode")),
        ("other_role", lambda fleet: fleet.members.join("http://h0:1", "prefill")),
        ("unknown_worker", lambda fleet: fleet.members.leave("h9:1")),
        ("unknown_worker", lambda fleet: fleet.members.drain("h9:1", True)),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(code: str, act: Any) -> None:
    fleet = make("decode")
    before = fleet.workers
    with pytest.raises(FleetError) as caught:
        act(fleet)
    assert caught.value.code == code
    assert fleet.workers == before


def test_a_source_names_exactly_its_workers_and_leaves_the_others_alone() -> None:
    fleet = Fleet([])
    fleet.members.sync("config", {"http://a:1": "prefill", "http://b:1": "decode"})
    by_hand = fleet.members.join("http://c:1", "decode")
    fleet.members.sync("etcd", {"http://b:1": "decode", "http://d:1": "decode"})
    joined, left, _ = fleet.members.sync("config", {"http://e:1": "decode"})
    assert [w.id for w in joined] == ["e:1"]
    assert [w.id for w in left] == ["a:1"]
    assert list(fleet.by_id) == ["b:1", "c:1", "d:1", "e:1"]  # etcd still has b
    assert [w.id for w in fleet.members.sync("etcd", {}).left] == ["b:1", "d:1"]
    assert list(fleet.by_id) == ["c:1", "e:1"]
    assert by_hand in fleet.workers


def test_a_worker_that_changes_its_role_joins_anew() -> None:
    fleet = Fleet([])
    fleet.members.sync("etcd", {"http://a:1": "prefill"})
    old = fleet.by_id["a:1"]
    joined, left, _ = fleet.members.sync("etcd", {"http://a:1": "decode"})
    assert left == [old]
    assert [(w.id, w.role) for w in joined] == [("a:1", "decode")]
    listed = {"http://a:1": "prefill", "h2": "decode", "http://b:1": "boss", "http://c:1": "agg"}
    joined, left, problems = fleet.members.sync("config", listed)
    assert ([w.id for w in joined], left) == (["c:1"], [])
    for problem, said in zip(problems, ("etcd has it as 'decode'", "'h2'", "'boss'"), strict=True):
        assert said in problem


@dataclass
class Known:
    """What the rules say of a worker."""

    worker: Worker
    ready: bool = True
    drained: bool = False
    stopping: bool = False
    unanswered: int = 0
    failures: int = 0
    is_open: bool = False
    wait_s: float = 0.0
    """Of an open circuit: nobody may try before."""
    trial: int = 0
    """The newest, which lets others try when its stream begins; 0 after a failure."""

    @property
    def gets_requests(self) -> bool:
        return self.ready and not self.drained and not self.stopping

    def may_try(self, now_s: float) -> bool:
        return self.gets_requests and (not self.is_open or now_s >= self.wait_s)

    def is_well(self) -> None:
        self.failures, self.is_open = 0, False


class Day:
    """A fleet, and what is known of its workers."""

    def __init__(self, seed: int) -> None:
        self.dice, self.now_s = random.Random(seed), 0.0
        self.fleet = make("prefill", "decode", "decode", "agg")
        self.known = {worker.id: Known(worker) for worker in self.fleet.workers}
        self.trials: list[tuple[Known, int]] = []

    def pick(self) -> Known:
        return self.dice.choice(list(self.known.values()))

    def failure(self, one: Known) -> None:
        was_open = one.is_open
        one.failures += 1
        if one.failures >= 2:
            one.is_open, one.wait_s, one.trial = True, self.now_s + 5, 0
        assert self.fleet.on_failure(one.worker, self.now_s) == (one.is_open and not was_open)

    def success(self, one: Known) -> None:
        one.is_well()
        self.fleet.on_success(one.worker)

    def selected(self, one: Known) -> None:
        trial = self.fleet.on_selected(one.worker, self.now_s)
        assert bool(trial) == one.is_open
        if trial:
            one.wait_s, one.trial = self.now_s + 5, trial
            self.trials.append((one, trial))

    def answering(self, one: Known) -> None:
        if self.trials:
            one, trial = self.dice.choice(self.trials[-3:])
            if one.is_open and trial == one.trial:
                one.wait_s = self.now_s
            self.fleet.on_trial_answering(one.worker, trial, self.now_s)

    def probed_ready(self, one: Known) -> None:
        comes_back, before = not one.ready or one.stopping, one.worker.incarnation
        if comes_back:
            one.is_well()
        one.ready, one.stopping, one.unanswered = True, False, 0
        assert self.fleet.on_probe_ready(one.worker) == comes_back
        assert (one.worker.incarnation != before) == comes_back

    def probed_not_ready(self, one: Known) -> None:
        was_ready, one.ready, one.stopping = one.ready, False, False
        one.unanswered += 1
        assert self.fleet.on_probe_not_ready(one.worker) == was_ready

    def unanswered(self, one: Known) -> None:
        one.unanswered += 1
        goes_down = one.ready and one.unanswered >= 2
        one.ready = one.ready and not goes_down
        assert self.fleet.on_probe_unanswered(one.worker, failures_to_down=2) == goes_down

    def probed_stopping(self, one: Known) -> None:
        was_stopping, one.stopping, one.unanswered = one.stopping, True, 0
        assert self.fleet.on_probe_stopping(one.worker) != was_stopping

    def drain(self, one: Known) -> None:
        one.drained = self.dice.random() < 0.5
        self.fleet.members.drain(one.worker.id, one.drained)

    def leave(self, one: Known) -> None:
        """And join again: a new worker, of which nothing is known."""
        self.fleet.members.leave(one.worker.id)
        del self.known[one.worker.id]
        self.trials = [trial for trial in self.trials if trial[0] is not one]
        again = join(self.fleet, one.worker.url, one.worker.role)
        self.known[again.id] = Known(again)

    def check(self) -> None:
        def those(role: str, condition: Callable[[Known], bool]) -> tuple[Worker, ...]:
            return tuple(k.worker for k in self.known.values() if k.worker.role == role and condition(k))

        def may_try(one: Known) -> bool:
            return one.may_try(self.now_s)

        snapshot = self.fleet.snapshot("m", self.now_s)
        assert snapshot.prefill == those("prefill", may_try)
        choices = [
            those(role, condition)
            for condition in (may_try, lambda k: k.gets_requests)
            for role in ("decode", "agg")
        ]
        assert snapshot.decode == next(filter(None, choices), ())
        leaving = [those(role, lambda k: k.ready and not k.gets_requests) for role in ("decode", "agg")]
        assert snapshot.draining == leaving[0] + leaving[1]
        away = {id_ for id_, known in self.known.items() if known.drained or known.stopping}
        assert snapshot.members == self.known.keys() - away


EVENTS = (
    *[Day.failure] * 4,
    *[Day.selected] * 4,
    *[Day.answering] * 3,
    *[Day.probed_ready] * 3,
    *(Day.success, Day.probed_not_ready, Day.unanswered, Day.probed_stopping, Day.drain, Day.leave),
)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_requests_go_where_the_rules_say(seed: int) -> None:
    day = Day(seed)
    for _ in range(120):
        day.now_s += day.dice.choice([0.0, 0.1, 1.0, 4.9])
        day.check()  # what was found before is still right at this time
        day.dice.choice(EVENTS)(day, day.pick())
        day.check()


@pytest.mark.parametrize(
    ("of_each", "says", "processes", "slots"), [(0, 8, 1, 32), (0, 8, 3, 11), (5, 8, 2, 5), (0, 0, 2, 4096)]
)
def test_the_processes_of_a_router_share_what_runs_at_its_workers(
    of_each: int, says: int, processes: int, slots: int
) -> None:
    made = [Worker("decode", f"http://h{number}:1") for number in range(2)]
    fleet = Fleet(made, running_per_worker=of_each, processes=processes)
    for worker in made:
        fleet.on_info(worker, info())
        fleet.on_probe_ready(worker)
        fleet.on_load(worker, WorkerLoad(max_running_requests=says))
    assert fleet.snapshot("m", 0.0).slots == slots


def test_prompts_that_wait_are_those_of_this_router_and_what_else_the_worker_reports() -> None:
    fleet = make("decode")
    worker = fleet.workers[0]
    fleet.on_queued(worker, 4000)
    fleet.on_queued(worker, 1000)
    fleet.on_load(worker, WorkerLoad(waiting_requests=1, queued_tokens=1000))  # the first one is computed
    fleet.on_queued(worker, -4000)  # and its answer is here
    assert worker.queued_tokens == 1000
    fleet.on_load(worker, WorkerLoad(waiting_requests=2, queued_tokens=1500))  # another router has some
    assert worker.queued_tokens == 1500
    fleet.on_queued(worker, -1000)
    assert worker.queued_tokens == 500
    fleet.on_load(worker, None)
    assert worker.queued_tokens == 0
