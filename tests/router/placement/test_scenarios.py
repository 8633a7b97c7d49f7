"""Placement as scenario files: what is done, and under it what the planner then says.

    > router KEY=VALUE ...            the configuration, keys as in launch/router.toml, values as in TOML
    > workers prefill=p1,p2 decode=d1 workers that are ready
    > load WORKER running=3 waiting=1 queued=5000 free=800     the worker says how busy it is
    > pool WORKER ...                                        these reach the pool
    > direct WORKER ...                                      these hand over directly
    > down | up | drain | leave WORKER
    > wait SECONDS
    > turn [SESSION] prompt=abc ...  a request; each letter is a block of 256 tokens, prompts with the same
                                     first letters begin alike. answer=TOKENS; unpublished: the prefill
                                     worker's pages are not in the pool; held: the request goes on
    > long COUNT every=SECONDS       so many requests with prompts of 16,384 tokens, one after another

Changed on purpose? `python -m tests.router.placement.test_scenarios` writes the files anew.
Read the difference.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import xxhash

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role, WorkerInfo, WorkerLoad
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan, RequestFacts
from pdserve.router.placement.prefix_index import Prefix
from pdserve.router.sessions.keys import named
from pdserve.settings.config_file import build_config

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
TOKENS_PER_LETTER = 256


class Scenario:
    """A placer and its fleet, driven by the lines of a file."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = 0
        self.fleet = Fleet(())
        self.router([])

    def run(self, line: str) -> str | None:
        command, *words = line.split()
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        bare = [word for word in words if "=" not in word]
        said: str | None = (
            getattr(self, command)(*bare, **pairs) if command != "router" else self.router(words)
        )
        return said

    def router(self, words: list[str]) -> None:
        # short prompts, too, have both stages where a scenario says nothing else
        data: dict[str, Any] = {"min_prefill_tokens": 0} | tomllib.loads("\n".join(words))
        self.placer = Placer(build_config(RouterConfig, data, source="scenario"), self.fleet)

    def workers(self, **roles: str) -> None:
        for role, names in roles.items():
            for name in names.split(","):
                self._join(name, role)  # type: ignore[arg-type]

    def _join(self, name: str, role: Role) -> None:
        worker = self.fleet.members.join(f"http://{name}:1", role)
        self.fleet.on_info(worker, WorkerInfo(role, "m"))
        self.fleet.on_probe_ready(worker)

    def pool(self, *names: str) -> None:
        for name in names:
            self.fleet.on_load(self.fleet.by_id[f"{name}:1"], None, pool_up=True)

    def direct(self, *names: str) -> None:
        for name in names:
            worker = self.fleet.by_id[f"{name}:1"]
            port = 8998 if worker.role == "prefill" else None
            self.fleet.on_info(worker, WorkerInfo(worker.role, "m", handoff="direct", bootstrap_port=port))

    def load(
        self, name: str, running: str = "0", waiting: str = "0", queued: str = "0", free: str = ""
    ) -> None:
        load = WorkerLoad(int(running), int(waiting), int(queued), int(free) if free else None)
        worker = self.fleet.by_id[f"{name}:1"]
        self.fleet.on_load(worker, load, pool_up=worker.pool_up)

    def down(self, name: str) -> None:
        self.fleet.on_probe_not_ready(self.fleet.by_id[f"{name}:1"])

    def up(self, name: str) -> None:
        self.fleet.on_probe_ready(self.fleet.by_id[f"{name}:1"])

    def drain(self, name: str) -> None:
        self.fleet.members.drain(f"{name}:1", True)

    def leave(self, name: str) -> None:
        self.fleet.members.leave(f"{name}:1")

    def wait(self, seconds: str) -> None:
        self.now_s += float(seconds)

    def turn(self, *words: str, prompt: str = "", answer: str = "0") -> str:
        self.turns += 1
        session = next((word for word in words if word not in ("held", "unpublished")), None)
        digests = [xxhash.xxh3_64_intdigest(prompt[: i + 1].encode()) for i in range(len(prompt))]
        facts = RequestFacts(
            ENDPOINTS["/v1/completions"],
            session=named(session) if session else None,
            is_turn=session is not None,
            prompt_tokens_estimate=len(prompt) * TOKENS_PER_LETTER,
            turn=self.turns,
            draw=self.turns * 7919,
            prefix=Prefix(tuple(digests)) if self.placer.needs_prefix else None,
        )
        last = None if facts.session is None else self.placer.sessions.get(facts.session, self.now_s)
        try:
            plan = self.placer.plan(facts, self.fleet.snapshot("m", self.now_s), last, self.now_s)
        except NoWorkerError as error:
            return f"503: {error}"
        self._carry_out(facts, plan, int(answer), words)
        return describe(plan)

    def long(self, count: str, every: str) -> str:
        changes = 0
        for number in range(int(count)):
            changes -= sum(self.placer.elastic.changes().values())
            self.turn(f"long{number}", prompt=chr(0x4E00 + number) * 64)
            changes += sum(self.placer.elastic.changes().values())
            self.wait(every)
        return f"{changes} changes of duty"

    def _carry_out(self, facts: RequestFacts, plan: Plan, answer: int, words: tuple[str, ...]) -> None:
        if plan.prefill is not None:
            missing = 1 if "unpublished" in words else 0
            self.placer.on_prefilled(facts, plan.prefill, 1, missing, self.now_s)
        begun = self.placer.on_answering(facts, plan, plan.decode, f"r{self.turns}", self.now_s)
        if "held" in words:
            self.fleet.on_selected(plan.decode, self.now_s)
            return
        self.placer.on_answered(facts, begun, answer, self.now_s)


def describe(plan: Plan) -> str:
    stages = [plan.decode.id] if plan.prefill is None else [plan.prefill.id, plan.decode.id]
    settle = "" if plan.settle is None else f"; waits for {plan.settle.request_id} at {plan.settle.worker.id}"
    return f"{' > '.join(stages)}: {', '.join(plan.reasons)}{settle}".replace(":1", "")


def play(text: str) -> str:
    """The scenario with what is said in it now."""
    scenario, lines = Scenario(), []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            said = scenario.run(line[2:])
            if said is not None:
                lines.append(f"  {said}")
        elif not line.startswith("  "):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    text = file.read_text()
    assert play(text) == text


def test_there_are_scenarios() -> None:
    assert FILES


if __name__ == "__main__":
    for file in FILES:
        file.write_text(play(file.read_text()))
