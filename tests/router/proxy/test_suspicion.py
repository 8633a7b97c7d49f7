"""Who is to blame for the deaths of workers, and how suspects are sent to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.proxy.failures import WorkerWait
from pdserve.router.proxy.suspicion import MAX_BLAMED, WINDOW_S, Flight, Suspects, Suspicion, Verdict

CHAT = "/v1/chat/completions"


class Scene:
    """Workers that die while they have requests, told to one `Suspicion`."""

    def __init__(self) -> None:
        self.suspicion = Suspicion(seed=7)
        self.members: dict[str, Worker] = {}
        self.flying: list[Flight] = []
        self.now_s = 0.0

    def worker(self) -> Worker:
        worker = Worker("decode", f"http://h:{len(self.members) + 1}")
        worker.ready = True
        self.members[worker.id] = worker
        return worker

    def send(self, worker: Worker, names: Iterable[str], *, is_young: bool = True) -> list[Flight]:
        flights = [
            Flight(worker, worker.incarnation, CHAT, name.encode(), is_young=is_young) for name in names
        ]
        self.flying += flights
        return flights

    def cut(self, flights: Iterable[Flight]) -> None:
        """Their connections are lost."""
        flights = list(flights)
        for flight in flights:
            beside = [one for one in self.flying if one.worker is flight.worker and one is not flight]
            self.suspicion.on_lost(flight, beside)
        self.flying = [one for one in self.flying if one not in flights]

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
    first, third = scene.worker(), scene.worker()
    scene.kill(first, scene.send(first, ["n"]))
    scene.suspicion.on_answered(CHAT, b"n")
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


def request(body: bytes) -> Any:
    return SimpleNamespace(endpoint=SimpleNamespace(path="/v1/completions"), body=body)


class SuspectScene:
    def __init__(self) -> None:
        self.worker = Worker("decode", "http://h:1")
        self.fleet = Fleet([self.worker])
        self.fleet.on_probe_ready(self.worker)
        self.upstream = Upstream(Limits())
        self.suspects = Suspects(self.fleet, self.upstream, Stats(), WorkerWait(self.fleet))

    async def lose(self, *requests: Any) -> None:
        """The worker dies, once each: every request was alone there."""
        for each in requests:
            self.fleet.on_probe_ready(self.worker)
            self.suspects.on_failure(each, self.worker, UpstreamError("closed", "it is gone"))
            self.fleet.on_probe_not_ready(self.worker)


async def test_the_next_suspect_begins_when_the_one_before_it_has_passed_the_turn_on() -> None:
    scene, (one, two) = SuspectScene(), (request(b"1"), request(b"2"))
    await scene.lose(one, two)
    assert await scene.suspects.take_turn(one)
    second = asyncio.ensure_future(scene.suspects.take_turn(two))
    assert not await scene.suspects.take_turn(request(b"3")), "no suspect waits for nobody"
    assert not second.done()
    scene.suspects.pass_turn()
    assert await second
    scene.suspects.pass_turn()
    scene.upstream.close()


async def test_a_suspect_that_needs_two_workers_at_a_time_has_one_turn_for_both() -> None:
    scene, one = SuspectScene(), request(b"1")
    await scene.lose(one, request(b"2"))
    assert await scene.suspects.take_turn(one)
    assert not await asyncio.wait_for(scene.suspects.take_turn(one), 1)
    scene.suspects.pass_turn()
    scene.upstream.close()


async def test_who_leaves_while_it_waits_for_the_turn_keeps_nobody_waiting() -> None:
    scene, (one, two) = SuspectScene(), (request(b"1"), request(b"2"))
    await scene.lose(one, two)
    assert await scene.suspects.take_turn(one)
    waiting = asyncio.ensure_future(scene.suspects.take_turn(two))
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    scene.suspects.pass_turn()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await asyncio.wait_for(scene.suspects.take_turn(two), 1)
    scene.suspects.pass_turn()
    scene.upstream.close()
