"""Who is to blame for the deaths of workers, and how suspects are sent to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.router.dispatch.job import WorkerWait
from pdserve.router.dispatch.suspicion import MAX_BLAMED, WINDOW_S, Flight, Suspects, Suspicion, Verdict
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.upstream.connection import UpstreamError

CHAT = "/v1/chat/completions"


class Scene:
    """Workers that die while they have requests, told to one `Suspicion`."""

    def __init__(self) -> None:
        self.suspicion = Suspicion(seed=7)
        self.members: dict[str, Worker] = {}
        self.now_s = 0.0

    def worker(self) -> Worker:
        worker = Worker("decode", f"http://h:{len(self.members) + 1}")
        worker.ready = True
        self.members[worker.id] = worker
        return worker

    def send(self, worker: Worker, names: Iterable[str], *, is_young: bool = True) -> list[Flight]:
        flights = [self.suspicion.begin(worker, CHAT, name.encode()) for name in names]
        for flight in flights:
            flight.is_young = is_young
        return flights

    def cut(self, flights: Iterable[Flight]) -> None:
        """Their connections are lost."""
        flights = list(flights)
        for flight in flights:
            self.suspicion.on_lost(flight)
        for flight in flights:
            self.suspicion.end(flight)

    def judge(self) -> None:
        self.suspicion.judge(self.members, self.now_s)

    def kill(self, worker: Worker, flights: Iterable[Flight]) -> None:
        self.cut(flights)
        worker.ready = False
        self.judge()

    def verdict(self, name: str) -> Verdict:
        return self.suspicion.verdict(CHAT, name.encode(), self.now_s)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("is_young", [True, False])
def test_a_request_that_was_alone_at_two_deaths_is_poison(scene: Scene, is_young: bool) -> None:
    for expected in ("innocent", "poison"):
        worker = scene.worker()
        scene.kill(worker, scene.send(worker, ["p"], is_young=is_young))
        assert scene.verdict("p") == expected
    assert scene.verdict("other") == "innocent"


def test_among_sixteen_streams_that_two_workers_lose_nobody_is_poison(scene: Scene) -> None:
    names = [f"n{i}" for i in range(16)]
    for is_young in (False, False, True):
        worker = scene.worker()
        scene.kill(worker, scene.send(worker, names, is_young=is_young))
    assert {scene.verdict(name) for name in names} == {"innocent"}


def test_a_request_without_a_first_byte_has_the_blame_that_running_streams_do_not_get(scene: Scene) -> None:
    for _ in range(2):
        worker = scene.worker()
        streams = scene.send(worker, [f"n{i}" for i in range(16)], is_young=False)
        scene.kill(worker, streams + scene.send(worker, ["p"]))
    assert scene.verdict("p") == "poison"
    assert {scene.verdict(f"n{i}") for i in range(16)} == {"innocent"}


def test_after_a_crowd_the_one_that_was_sent_alone_is_told_apart(scene: Scene) -> None:
    first, second = scene.worker(), scene.worker()
    crowd = [*(f"n{i}" for i in range(15)), "p"]
    scene.kill(first, scene.send(first, crowd))
    assert scene.suspicion.is_notable(CHAT, b"p")
    newcomers = scene.send(second, ["new1", "new2"])  # they came after the first death
    scene.kill(second, newcomers + scene.send(second, ["p"]))
    assert scene.verdict("p") == "poison"
    assert {scene.verdict(name) for name in (*crowd[:-1], "new1", "new2")} == {"innocent"}


def test_of_a_crowd_that_is_too_large_nobody_waits_for_the_others(scene: Scene) -> None:
    worker = scene.worker()
    scene.kill(worker, scene.send(worker, [f"n{i}" for i in range(100)]))
    assert not scene.suspicion.is_notable(CHAT, b"n1")


def test_a_request_that_is_answered_is_innocent_again(scene: Scene) -> None:
    first, second, third = (scene.worker() for _ in range(3))
    scene.kill(first, scene.send(first, ["n"]))
    [flight] = scene.send(second, ["n"])
    scene.suspicion.on_answered(flight)
    scene.suspicion.end(flight)
    assert not scene.suspicion.is_active
    scene.kill(third, scene.send(third, ["n"]))
    assert scene.verdict("n") == "innocent"


def test_equal_requests_of_many_clients_do_not_add_up_to_one_that_was_alone(scene: Scene) -> None:
    for _ in range(3):
        worker = scene.worker()
        scene.kill(worker, scene.send(worker, ["same"] * 16))
    assert scene.verdict("same") == "innocent"


def test_a_lost_connection_to_a_worker_that_lives_is_no_death(scene: Scene) -> None:
    for _ in range(2):
        worker = scene.worker()
        scene.cut(scene.send(worker, ["n"]))
        worker.probes_ready += 1  # that probe may have been under way
        scene.judge()
    assert scene.verdict("n") == "undecided"
    for worker in scene.members.values():
        worker.probes_ready += 1
    scene.judge()
    assert scene.verdict("n") == "innocent"
    assert not scene.suspicion.is_active


def test_a_worker_that_lost_a_connection_once_can_still_die(scene: Scene) -> None:
    first, second = scene.worker(), scene.worker()
    scene.cut(scene.send(first, ["n"]))
    first.probes_ready += 2
    scene.judge()
    scene.kill(first, scene.send(first, ["p"]))
    scene.kill(second, scene.send(second, ["p"]))
    assert scene.verdict("p") == "poison"


def test_a_new_generation_of_a_worker_shows_that_the_old_one_died_and_can_die_itself(scene: Scene) -> None:
    worker = scene.worker()
    for number in range(2):
        scene.cut(scene.send(worker, ["p"]))
        worker.incarnation = f"h#{number}"  # it was away, and is ready again
        scene.judge()
    assert scene.verdict("p") == "poison"


def test_the_end_of_a_worker_that_was_told_to_end_is_no_death(scene: Scene) -> None:
    for how in ("stopping", "drained"):
        worker = scene.worker()
        setattr(worker, how, True)
        scene.kill(worker, scene.send(worker, ["n"]))
    worker = scene.worker()
    flights = scene.send(worker, ["n"])
    del scene.members[worker.id]  # it has left the fleet
    scene.kill(worker, flights)
    assert scene.verdict("n") == "innocent"
    assert not scene.suspicion.is_active


def test_one_death_is_one_unit_of_blame_however_its_connections_end(scene: Scene) -> None:
    worker = scene.worker()
    one, two = scene.send(worker, ["p", "p"])
    scene.kill(worker, [one])
    scene.kill(worker, [two])
    assert scene.verdict("p") == "innocent"


def test_blame_ends_and_the_newest_are_remembered(scene: Scene) -> None:
    for _ in range(2):
        worker = scene.worker()
        scene.kill(worker, scene.send(worker, ["p"]))
    scene.now_s = WINDOW_S
    assert scene.verdict("p") == "innocent"
    scene.judge()
    assert not scene.suspicion.is_active
    for number in range(MAX_BLAMED + 1):
        worker = scene.worker()
        scene.kill(worker, scene.send(worker, [f"n{number}"]))
    last = scene.worker()
    scene.kill(last, scene.send(last, ["n0"]))
    assert scene.verdict("n0") == "innocent"  # its first death is forgotten
    last = scene.worker()
    scene.kill(last, scene.send(last, [f"n{MAX_BLAMED}"]))
    assert scene.verdict(f"n{MAX_BLAMED}") == "poison"


# --- Suspects go to workers one at a time


def call(body: bytes) -> Any:
    return SimpleNamespace(endpoint=SimpleNamespace(path="/v1/completions"), body=body)


class SuspectScene:
    def __init__(self) -> None:
        self.workers = [Worker("decode", f"http://h:{port}") for port in (1, 2)]
        self.fleet = Fleet(self.workers)
        for worker in self.workers:
            self.fleet.on_probe_ready(worker)
        self.suspects = Suspects(self.fleet, Stats(), WorkerWait(self.fleet))

    async def lose(self, *calls: Any) -> None:
        """The first worker dies with these calls."""
        attempts = [await self.suspects.begin(each, self.workers[0]) for each in calls]
        for attempt in attempts:
            attempt.on_failure(UpstreamError("closed", "it is gone"))
            attempt.end()
        self.fleet.on_probe_not_ready(self.workers[0])


@pytest.mark.parametrize("how", ["on_first_byte", "end"])
async def test_the_next_suspect_begins_when_the_one_before_it_has_a_first_byte_or_is_over(how: str) -> None:
    scene, (one, two) = SuspectScene(), (call(b"1"), call(b"2"))
    await scene.lose(one, two)
    first = await scene.suspects.begin(one, scene.workers[1])
    second = asyncio.ensure_future(scene.suspects.begin(two, scene.workers[1]))
    other = await scene.suspects.begin(call(b"3"), scene.workers[1])  # no suspect waits for nobody
    assert not second.done()
    getattr(first, how)()
    for attempt in (await second, other, *([] if how == "end" else [first])):
        attempt.end()


async def test_a_suspect_that_needs_two_workers_at_a_time_gets_them() -> None:
    scene, one = SuspectScene(), call(b"1")
    await scene.lose(one, call(b"2"))
    attempts = [await asyncio.wait_for(scene.suspects.begin(one, worker), 1) for worker in scene.workers]
    for attempt in attempts:
        attempt.end()
    last = await asyncio.wait_for(scene.suspects.begin(call(b"2"), scene.workers[1]), 1)
    last.end()
