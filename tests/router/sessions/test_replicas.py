"""Router replicas that share nothing, and one that was restarted, send a session to the same worker."""

from __future__ import annotations

import random
from collections import deque

import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.placement import Session
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker, WorkerInfo
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.sessions.keys import named
from tests.support.router.harness import PATIENT, routed
from tests.support.router.mock_worker import MockWorker, workers
from tests.support.suite.extended import extended

SESSIONS, WORKERS = 10_000, 7
CONFIG = RouterConfig(prefill_policy="affinity", min_prefill_tokens=256)


class Replica:
    """A router's decisions, and the requests that it has in flight."""

    def __init__(self, names: list[str], in_flight: int) -> None:
        self.in_flight = in_flight
        self.fleet = Fleet(())
        for name in names:
            for role in ("prefill", "decode"):
                worker = self.fleet.members.join(f"http://{role}-{name}:1", role)  # type: ignore[arg-type]
                self.fleet.on_info(worker, WorkerInfo(role, "m"))  # type: ignore[arg-type]
                self.fleet.on_probe_ready(worker)
        self.placer = Placer(CONFIG, self.fleet)
        self.running: deque[Worker] = deque()

    def place(self, session: str, tokens: int, now_s: float) -> tuple[str, str | None]:
        """One turn: (decode worker, prefill worker)."""
        facts = RequestFacts(
            ENDPOINTS["/v1/completions"], session=named(session), prompt_tokens_estimate=tokens
        )
        last = None if facts.session is None else self.placer.sessions.get(facts.session, now_s)
        plan = self.placer.plan(facts, self.fleet.snapshot("m", now_s), last, now_s)
        self.placer.on_answering(facts, plan, plan.decode, "r", now_s)
        self.fleet.on_selected(plan.decode, now_s)
        self.running.append(plan.decode)
        if len(self.running) > self.in_flight:
            self.fleet.on_released(self.running.popleft())
        return plan.decode.id, plan.prefill and plan.prefill.id


@pytest.mark.parametrize(
    ("in_flight", "most_moves"),
    [
        extended(7, 0),  # no worker can have more than the 8 requests that are never called overload
        (20, 150),  # four turns in a thousand find their worker with three times the mean, and move
    ],
)
def test_two_replicas_agree_over_ten_thousand_sessions_and_after_a_restart(
    in_flight: int, most_moves: int
) -> None:
    dice = random.Random(4)
    names = [f"w{i}" for i in range(WORKERS)]
    replicas = [Replica(names, in_flight), Replica(dice.sample(names, WORKERS), in_flight)]
    turns = [f"session-{i}" for i in range(SESSIONS)] * 3
    dice.shuffle(turns)
    homes: dict[str, tuple[str, str | None]] = {}
    moves = 0
    for number, session in enumerate(turns):
        if number == len(turns) // 2:
            replicas[1] = Replica(dice.sample(names, WORKERS), in_flight)
        home = dice.choice(replicas).place(session, 1000, number * 0.01)
        moves += homes.setdefault(session, home) != home
    assert moves <= most_moves
    assert len(homes) == SESSIONS
    shares = [sum(decode == f"decode-{name}:1" for decode, _ in homes.values()) for name in names]
    assert max(shares) < 1.15 * SESSIONS / WORKERS


async def test_two_routers_and_a_restarted_one_agree_over_real_connections() -> None:
    decodes = [MockWorker("decode") for _ in range(3)]
    async with workers(*decodes):
        urls = tuple(worker.url for worker in decodes)
        session = Session(sources=("cookie:sid",))
        here = RouterConfig(decode=urls, deadlines=PATIENT, session=session)
        there = RouterConfig(decode=urls[::-1], deadlines=PATIENT, session=session)
        homes: dict[str, str] = {}
        async with routed(there) as second:
            for config in (here, here):  # the second time: the first router, restarted
                async with routed(config) as first:
                    for i in range(60):
                        for router in (first, second):
                            response = await router.chat(headers={"cookie": f"sid=s{i}"})
                            home = response.headers["x-pdserve-decode"]
                            assert homes.setdefault(f"s{i}", home) == home
        assert set(homes.values()) == {worker.id for worker in decodes}
