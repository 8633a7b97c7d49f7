"""Hours of coding agents' turns against a disaggregated cluster with an SSD tier, while workers are killed
and the pool's node is upgraded: what hangs, what is wrong, and what grows.

Sessions follow each other without end, so many at a time: a prompt that all share, a past of one's own, and
turns that repeat everything before. Of `--every` answers one is asked of plain SGLang too, which must say the
same. No time is judged. The script fails where a request hung or failed, an answer differs, pins are left, or
memory or descriptors of router or pool node grow by more than 1 % an hour in the second half of the run. In
the first hour tables and tiers fill to their bounds: the router's sessions, the files of the SSD tier.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

import msgspec
import psutil
import typer

from benchmarks.lib.client import Response, ServerClient, asked
from benchmarks.lib.cluster import ExtraArgs, ModelOption, PoolCapacityOption, launched, settings_of
from benchmarks.lib.load import Request, Session, Shape, make_load
from benchmarks.lib.report import FormatOption, OutOption, Output, Seed, Table, fail_with, say, script
from tests.support.processes import HarnessError

CONTENDER: Final = "soak"
WORKERS: Final = ("decode0", "prefill0", "decode1")
"""Killed in turn."""
STEADY: Final = ("router", "pool0")
"""Whose growth is judged: the others are killed too often to show any."""
CODING: Final = Shape(
    users=100, rounds=6, system_tokens=512, history_tokens=256, turn_tokens=64, output_tokens=16, spread=0.3
)
SILENCE_S: Final = 60.0
SAMPLE_S: Final = 5.0
LEASES_S: Final = 60.0
GROWTH: Final = 0.01  # an hour
JUDGED_MINUTES: Final = 30.0  # a shorter run shows growth only: processes are still warming up
DEVICE_TOKENS: Final = 8192


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One process and its children at one time: private memory, descriptors."""

    at_s: float
    name: str
    memory_bytes: int
    descriptors: int


class Counts(msgspec.Struct, kw_only=True):
    """What has happened. `hung`: no answer within SILENCE_S."""

    answered: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    hung: int = 0
    failed: dict[str, int] = {}
    compared: int = 0
    differed: int = 0
    kills: int = 0
    upgrades: int = 0


def main(
    model: ModelOption,
    minutes: Annotated[float, typer.Option(min=0.5, help="Length of the run.")] = 120.0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="Of so many answers one is compared.")] = 50,
    kill: Annotated[float, typer.Option(min=0.1, help="Minutes between two kills of workers.")] = 10.0,
    upgrade: Annotated[float, typer.Option(min=0.1, help="Minutes between two upgrades.")] = 20.0,
    pool_capacity: PoolCapacityOption = "128MiB",
    seed: Seed = 1,
    out: OutOption = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    output = Output(format, minutes=minutes, sessions=sessions, model=model.name, seed=seed)
    with ExitStack() as stack:
        settings = stack.enter_context(
            settings_of(model, DEVICE_TOKENS, extra, out, pool_capacity=pool_capacity)
        )
        urls = {}
        for name in ("plain", CONTENDER):
            say(f"starting {name}")
            urls[name] = stack.enter_context(launched(name, settings)).url
        run = Soak(urls[CONTENDER], urls["plain"], settings.directory / CONTENDER, seed, every)
        asyncio.run(run.run(60 * minutes, sessions, 60 * kill, 60 * upgrade))
        pins = run.pins_left()
    rows, problems = [], [f"{pins} pins are left"] if pins else []
    for name, what, before, after, an_hour in growth(run.samples, 60 * minutes):
        rows.append((name, what, f"{before:,.0f}", f"{after:,.0f}", f"{an_hour:+.1%}"))
        output.row({"name": name, "what": what, "before": before, "after": after, "growth_an_hour": an_hour})
        if an_hour > GROWTH and minutes >= JUDGED_MINUTES:
            problems.append(f"{name}: {what} grow by {an_hour:.1%} an hour")
    for sample in run.samples:
        if sample.name in STEADY:
            output.row(sample)
    output.row(run.counts, pins=pins)
    output.show(
        Table("In the second half", ("process", "what", "mean then", "at the end", "an hour"), rows),
        f"{msgspec.to_builtins(run.counts)}",
    )
    counts = run.counts
    problems += [f"{count} requests: {what}" for what, count in counts.failed.items()]
    problems += [f"{counts.hung} requests hung"] if counts.hung else []
    problems += [f"{counts.differed} answers differ from plain SGLang's"] if counts.differed else []
    fail_with(problems)


class Soak:
    """One run; `directory`: of the cluster's configurations and sockets."""

    def __init__(self, url: str, plain_url: str, directory: Path, seed: int, every: int) -> None:
        self.counts = Counts()
        self.samples: list[Sample] = []
        self._url, self._plain_url = url, plain_url
        self._directory = directory
        self._every = every
        self._sessions = (
            (Session(load.seed, load.keeps_history), requests)
            for load in (make_load(CODING, seed + number) for number in itertools.count())
            for requests in load.sessions
        )

    async def run(self, seconds: float, sessions: int, kill_s: float, upgrade_s: float) -> None:
        """Raises HarnessError where the model cannot be asked for."""
        self._ends_s = time.monotonic() + seconds
        self._client, self._plain = (ServerClient(url, SILENCE_S) for url in (self._url, self._plain_url))
        self._model, _ = await self._client.model()
        beside = [
            asyncio.create_task(self._often(SAMPLE_S, self._sample)),
            asyncio.create_task(self._often(kill_s, self._kill)),
            asyncio.create_task(self._often(upgrade_s, self._upgrade)),
        ]
        try:
            await asyncio.gather(*(self._load() for _ in range(sessions)))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self._client.aclose()
            await self._plain.aclose()

    async def _load(self) -> None:
        while time.monotonic() < self._ends_s:
            session, requests = next(self._sessions)
            for request in requests:
                if time.monotonic() > self._ends_s:
                    return
                await self._request(session, request)

    async def _request(self, session: Session, request: Request) -> None:
        body = {**session.prompt(request), **asked(self._model, request.output_tokens)}
        del body["return_token_ids"]  # a stream that tells them ends with its worker
        said = await self._client.request(body, {"x-session-id": f"soak-{id(session)}"})
        session.receive(request, () if said.error else said.token_ids)
        counts = self.counts
        if said.error:
            if said.error in ("no first token in time", "stalled"):
                counts.hung += 1
            self._failed(said.error)
            say(f"{said.error}: {said.detail}")
            return
        counts.answered += 1
        counts.cached_tokens += said.cached.total
        counts.prompt_tokens += said.prompt_tokens
        if counts.answered % self._every == 0:
            await self._compare(body, said)

    async def _compare(self, body: dict[str, Any], said: Response) -> None:
        plain = await self._plain.request(body, {})
        if plain.error:
            raise HarnessError(f"plain SGLang: {plain.error} {plain.detail}")
        self.counts.compared += 1
        if plain.text != said.text:
            self.counts.differed += 1
            say(f"another answer than plain SGLang's: {said.text!r}, {plain.text!r}")

    async def _often(self, every_s: float, do: Callable[[int], None]) -> None:
        for number in itertools.count():
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(do, number)
            except HarnessError as error:
                self._failed(str(error))

    def _failed(self, what: str) -> None:
        self.counts.failed[what] = self.counts.failed.get(what, 0) + 1

    # --- beside the load, in threads

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Those of the cluster by name, each the first of its tree."""
        seen = set()
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            for name in (*WORKERS, *STEADY):
                if f"{self._directory}/{name}.toml" in words and name not in seen and "-m" in words:
                    seen.add(name)
                    yield name, process

    def _sample(self, number: int) -> None:
        for name, process in self._processes():
            try:
                tree = [process, *process.children(recursive=True)]
                memory = sum(one.memory_full_info().uss for one in tree)
                descriptors = sum(one.num_fds() for one in tree)
            except psutil.Error:
                continue  # it is just being killed or replaced
            at_s = time.monotonic()
            self.samples.append(Sample(at_s=at_s, name=name, memory_bytes=memory, descriptors=descriptors))

    def _kill(self, number: int) -> None:
        name = WORKERS[number % len(WORKERS)]
        for found, process in self._processes():
            if found == name:
                process.kill()
                self.counts.kills += 1
                say(f"killed {name}; {msgspec.to_builtins(self.counts)}")

    def _upgrade(self, number: int) -> None:
        self._pool("upgrade")
        self.counts.upgrades += 1
        say("upgraded the pool's node")

    def pins_left(self) -> int:
        """Of the pool's node, once leases had time to end. Raises HarnessError."""
        until_s = time.monotonic() + LEASES_S
        while True:
            pins = int(json.loads(self._pool("status", "--json"))["pins"])
            if not pins or time.monotonic() > until_s:
                return pins
            time.sleep(1.0)

    def _pool(self, word: str, *more: str) -> str:
        node = f"unix:{self._directory}/pool0.sock"
        command = [sys.executable, "-m", "pdserve", "pool", word, node, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SILENCE_S, check=False)
        if done.returncode:
            raise HarnessError(f"pdserve pool {word}: {done.stderr.strip()}")
        return done.stdout


def growth(samples: Sequence[Sample], seconds: float) -> Iterator[tuple[str, str, float, float, float]]:
    """(process, what, mean of the third quarter, mean of the last, growth of it an hour), of those whose
    growth is judged.
    """
    for name in STEADY:
        its = [one for one in samples if one.name == name]
        quarter = len(its) // 4
        if not quarter:
            continue
        for what in ("memory_bytes", "descriptors"):
            before, after = (
                fmean(getattr(one, what) for one in part)
                for part in (its[-2 * quarter : -quarter], its[-quarter:])
            )
            yield name, what, before, after, (after / before - 1) * 3600 / (seconds / 4)


if __name__ == "__main__":
    script(main, __doc__)
