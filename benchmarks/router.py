"""What a router adds and what it can take: ours beside other routers and direct access to a worker, in the
same run.

Every router has one core, the same for all; mock workers (tests/support/router/fast_worker.py) and load have
the rest. For each number of streams there are rounds, in which the contenders take turns, in an order drawn
from the seed. A turn has three phases:

- whole: answers in one piece, one request after another on every connection: requests per second, and the
processor time of each. By `wrk` where it is installed (`--load-tool`), which is never the limit, else by
Python; - burst: streams as fast as they come: chunks per second; - paced: streams of 20 chunks a second each:
time to the first chunk, the time a chunk takes from the worker to the client, and the processor time of each.
A single stream is not paced, or there would be few chunks.

At the end comes one round of many long paced streams, in which none begins or ends.

As users have it (`--as-users`): every request has an API key and names its session, its chat has 20 messages,
and pdserve has its defaults (but both stages for every prompt); give `--prompt-bytes 16384` or `131072`, and
with `--workers 64` the policy of the decode workers by `--policy`. Peers get the same load, and the policy of
the same name where they have it.

Times are percentiles of
all rounds together, rates are medians of the rounds. "Added" is a router's percentile less that of direct
access to the decode worker, so it holds the prefill stage, whose worker answers at once, too.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import psutil
import typer
import uvloop

from benchmarks.lib.report import FormatOption, Output, Table, choices, numbers, say, script, workplace
from pdserve.resources.memory import raise_open_files
from pdserve.router.tenants.api_keys import key_line
from pdserve.settings.config_file import to_toml
from tests.support.processes import HarnessError, free_ports, server
from tests.support.router.fast_worker import MODEL
from tests.support.router.raw_load import PATH, Load, Loaded, make_requests, mock_workers, run_load

DIRECT: Final = "direct"
"""No router: the load goes to the decode worker."""
OURS: Final = "pdserve"
PEERS: Final = ("sglang-router", "smg", "vllm-router")
INTERVAL_US: Final = 50_000
BURST_CHUNKS: Final = 64
PACED_CHUNKS: Final = 8
LONG_WARM_UP_S: Final = 1.0
LONG_RAMP_S: Final = 0.002  # for each stream
REQUEST_TIMEOUT_S: Final = 5.0
BUSY: Final = 0.9
"""A load that uses more of its cores than this may be what limits the rate."""
IN_TURN: Final = """
local requests, number = {}, 0
for i = 0, COUNT - 1 do
    local file = io.open("DIRECTORY/" .. i, "rb")
    requests[i] = file:read("*a")
    file:close()
end
request = function()
    number = (number + 1) % COUNT
    return requests[number]
end
"""
"""Has wrk send the requests in files in turn."""
USER: Final = "benchmark"
KEY: Final = "key-of-the-benchmark-0123456789"
USERS_MESSAGES: Final = 20
PEERS_POLICIES: Final = {"cache_aware": "cache_aware", "power_of_two": "power_of_two"}
"""By our names of them; for all others they have `round_robin`."""

Phase = Literal["whole", "burst", "paced"]
PHASES: Final[tuple[Phase, ...]] = ("whole", "burst", "paced")
COLUMNS: Final = {
    "first chunk +p50": "added_ttft_ms_p50",
    "+p99": "added_ttft_ms_p99",
    "chunk +p50": "added_chunk_ms_p50",
    "+p99 ": "added_chunk_ms_p99",
    "requests/s": "rps",
    "chunks/s": "chunks_per_s",
    "CPU/request": "cpu_us_per_request",
    "CPU/chunk": "cpu_us_per_chunk",
    "MB": "rss_mb",
    "load busy": "load_busy",
    "errors": "errors",
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `long_streams` 0: no round of long ones. `wrk`: its path; empty: Python's load."""

    streams: Sequence[int]
    long_streams: int
    rounds: int
    seconds: float
    long_seconds: float
    prompt_bytes: int
    as_users: bool
    workers: int
    """Decode workers."""
    policy: str
    """Of decode workers; empty: the default."""
    seed: int
    wrk: str

    def load(self, **more: Any) -> Load:
        """What all loads have in common, and `more`."""
        as_users: dict[str, Any] = {"key": KEY, "messages": USERS_MESSAGES} if self.as_users else {}
        return Load(prompt_bytes=self.prompt_bytes, seed=self.seed, **as_users, **more)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender with so many streams; None: not measured. Processor time in µs: that of a chunk is of
    paced streams, so an eighth of a request's is in it but for the long ones. `load_busy`: the largest share
    of their cores that load and mock workers used; near 1 they were the limit.
    """

    router: str
    streams: int
    added_ttft_ms_p50: float | None
    added_ttft_ms_p99: float | None
    added_chunk_ms_p50: float | None
    added_chunk_ms_p99: float | None
    rps: float | None
    chunks_per_s: float | None
    cpu_us_per_request: float | None
    cpu_us_per_chunk: float | None
    rss_mb: float | None
    load_busy: float
    errors: int
    first_error: str


class Server(NamedTuple):
    """Who is measured, or a mock worker; without processes where no router is between."""

    name: str
    port: int
    processes: tuple[psutil.Process, ...] = ()

    def cpu_s(self) -> float:
        """Processor time that its processes have used."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(one.user + one.system for one in times))

    def rss_mb(self) -> float | None:
        """Memory of all its processes."""
        if not self.processes:
            return None
        return float(sum(process.memory_info().rss for process in self.processes) / 1e6)


class Turn(NamedTuple):
    """One phase of one contender in one round. `done`: requests, or chunks of streams."""

    phase: Phase
    loaded: Loaded
    done: int
    router_cpu_s: float
    load_cpu_s: float
    rss_mb: float | None


def main(
    streams: Annotated[str, typer.Option(help="Numbers of streams, separated by commas.")] = "1,16,64,512",
    long_streams: Annotated[
        int, typer.Option(min=0, help="Long streams of 20 chunks/s at the end; 0: none.")
    ] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each router at each number of streams.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each phase.")] = 1.0,
    long_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of the round of long streams.")] = 5.0,
    prompt_bytes: Annotated[int, typer.Option(min=0, help="Length of the requests' prompts.")] = 32,
    as_users: Annotated[
        bool, typer.Option("--as-users", help="API keys, sessions, chats of 20 messages, defaults.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    policy: Annotated[str, typer.Option(help="Policy for decode workers; empty: the default.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order of routers.")] = 1,
    peers: Annotated[
        str, typer.Option(help="Other routers, measured where they are installed; empty: none.")
    ] = ",".join(PEERS),
    load_tool: Annotated[
        str, typer.Option(help="wrk, or its path, for whole answers; empty: Python's load.")
    ] = "wrk",
    format: FormatOption = "text",
) -> None:
    wanted = choices("peers", peers, PEERS) if peers else []
    settings = Settings(
        streams=numbers("streams", streams),
        long_streams=long_streams,
        rounds=rounds,
        seconds=seconds,
        long_seconds=long_seconds,
        prompt_bytes=prompt_bytes,
        as_users=as_users,
        workers=workers,
        policy=policy,
        seed=seed,
        wrk=shutil.which(load_tool) or "",
    )
    output = Output(format, whole_answers_by="wrk" if settings.wrk else "Python")
    rows = []
    with workplace() as directory:
        for row in measure([name for name in wanted if _installed(name)], settings, directory):
            rows.append(row)
            output.row(row)
    cells = [
        (str(row.streams), row.router, *(_figure(getattr(row, name)) for name in COLUMNS.values()))
        for row in rows
    ]
    title = "Routers on one core: what each adds and can take; times in ms, processor time in µs"
    output.show(Table(title, ("streams", "router", *COLUMNS), cells, left=("router",)))
    if any(row.load_busy >= BUSY for row in rows):
        output.show(f"Where load busy is {BUSY} or more, the load may be the limit.")


def _installed(name: str) -> bool:
    found = shutil.which(name) is not None
    if not found:
        say(f"{name} is not installed, so it is left out: pip install {name}")
    return found


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.2f}"


def measure(peers: Sequence[str], settings: Settings, directory: Path) -> Iterator[Row]:
    """Rows, number by number of streams, direct access first, then pdserve. Raises HarnessError."""
    raise_open_files()
    cores = os.sched_getaffinity(0)
    core, rest = {max(cores)}, cores - {max(cores)} or cores  # with one core they share it
    with ExitStack() as stack:
        stack.enter_context(_on_cores(rest))
        workers = []
        for role, count in (("prefill", 1), ("decode", settings.workers)):
            mock = stack.enter_context(mock_workers(role, directory, count))
            workers += [Server(role, port, (psutil.Process(mock.pid),)) for port in mock.ports]
        contenders = [Server(DIRECT, workers[1].port)]
        for name in (OURS, *peers):
            try:
                contenders.append(stack.enter_context(_router(name, workers, settings, directory, core)))
            except HarnessError as error:
                if name == OURS:
                    raise
                say(f"left out: {error}")
        bench = _Bench(contenders, workers[:2], settings, directory)
        for streams in settings.streams:
            yield from _rows(streams, bench.rounds(streams), len(rest))
        if settings.long_streams:
            yield from _rows(settings.long_streams, bench.long(), len(rest))


@contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """What is started in the block keeps to these cores; so does this process until the block ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _router(
    name: str, workers: Sequence[Server], settings: Settings, directory: Path, cores: set[int]
) -> Iterator[Server]:
    """A router before these workers that answers, on these cores. Raises HarnessError."""
    port, metrics_port = free_ports(2)
    prefill, *decode = (f"http://127.0.0.1:{worker.port}" for worker in workers)
    if name == OURS:
        config: dict[str, Any] = {
            "port": port,
            "prefill": [prefill],
            "decode": decode,
            "log_level": "warning",
            "min_prefill_tokens": 0,  # every request has both stages, as at the others
        }
        if settings.policy:
            config["decode_policy"] = settings.policy
        if settings.as_users:
            keys = directory / "keys"
            keys.write_text(key_line(USER, KEY))
            config["access"] = {"keys_file": str(keys)}
        file = directory / "router.toml"
        file.write_text(to_toml(config))
        command = [sys.executable, "-m", "pdserve", "router", "--config", str(file)]
    else:
        vllm = name == "vllm-router"
        command = [
            *(name, *(("--vllm-pd-disaggregation",) if vllm else ("launch", "--pd-disaggregation"))),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
            *("--prefill", prefill, *(() if vllm else ("8998",))),
            *(word for url in decode for word in ("--decode", url)),
            *("--policy", PEERS_POLICIES.get(settings.policy, "round_robin")),
            *("--log-level", "warning" if vllm else "warn"),
        ]
    with ExitStack() as running:
        with _on_cores(cores):
            log = directory / f"{name}.log"
            made = running.enter_context(server(name, command, log, lambda: _answers(port)))
        process = psutil.Process(made.pid)
        yield Server(name, port, (process, *process.children(recursive=True)))


def _answers(port: int) -> bool:
    """Whether a chat request is answered there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", PATH, json.dumps(body), headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Bench:
    """The contenders, running, and how they are loaded."""

    def __init__(
        self, contenders: Sequence[Server], workers: Sequence[Server], settings: Settings, directory: Path
    ) -> None:
        self._contenders = contenders
        self._workers = workers
        self._settings = settings
        self._directory = directory

    def rounds(self, streams: int) -> dict[str, list[Turn]]:
        """The turns of each contender with so many streams."""
        turns: dict[str, list[Turn]] = {one.name: [] for one in self._contenders}
        for number in range(self._settings.rounds):
            order = list(self._contenders)
            random.Random(f"{self._settings.seed} {streams} {number}").shuffle(order)
            for one in order:
                turns[one.name] += [self._turn(one, phase, self._load(phase, streams)) for phase in PHASES]
            say(f"{streams} streams, round {number + 1} of {self._settings.rounds}")
        return turns

    def long(self) -> dict[str, list[Turn]]:
        """One turn of each contender with long streams, which begin one by one before the window."""
        settings = self._settings
        ramp_s = settings.long_streams * LONG_RAMP_S
        lasts_s = ramp_s + LONG_WARM_UP_S + settings.long_seconds + 0.5
        load = settings.load(
            streams=settings.long_streams,
            seconds=settings.long_seconds,
            chunks=math.ceil(lasts_s * 1e6 / INTERVAL_US),
            interval_us=INTERVAL_US,
            ramp_s=ramp_s,
            warm_up_s=LONG_WARM_UP_S,
        )
        return {one.name: [self._turn(one, "paced", load)] for one in self._contenders}

    def _load(self, phase: Phase, streams: int) -> Load:
        interval_us = INTERVAL_US if phase == "paced" and streams > 1 else 0
        return self._settings.load(
            streams=streams,
            seconds=self._settings.seconds,
            chunks={"whole": 0, "burst": BURST_CHUNKS, "paced": PACED_CHUNKS}[phase],
            interval_us=interval_us,
            ramp_s=interval_us / 1e6,
        )

    def _turn(self, one: Server, phase: Phase, load: Load) -> Turn:
        """Put the load on one contender. Raises HarnessError."""
        here = psutil.Process()

        def look() -> tuple[float, float, float | None]:
            own = here.cpu_times()
            loading_s = own.user + own.system + own.children_user + own.children_system
            return one.cpu_s(), loading_s + sum(worker.cpu_s() for worker in self._workers), one.rss_mb()

        if phase == "whole" and self._settings.wrk:
            before = look()
            loaded = self._by_wrk(one, load)
            after = look()
        else:
            loaded, before, after = uvloop.run(run_load(load, one.port, look))
        done = loaded.requests if phase == "whole" else len(loaded.chunk_ms)
        return Turn(phase, loaded, done, after[0] - before[0], after[1] - before[1], after[2])

    def _by_wrk(self, one: Server, load: Load) -> Loaded:
        """Whole answers in a closed loop. Raises HarnessError."""
        requests, script_file = make_requests(load, one.port), self._directory / "in_turn.lua"
        for number, request in enumerate(requests):
            (self._directory / str(number)).write_bytes(request)
        text = IN_TURN.replace("COUNT", str(len(requests))).replace("DIRECTORY", str(self._directory))
        script_file.write_text(text)
        connections, seconds = ("-c", str(load.streams)), ("-d", f"{max(1, round(load.seconds))}s")
        command = [self._settings.wrk, "-t1", *connections, *seconds, "-s", str(script_file)]
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{one.port}{PATH}"], capture_output=True, text=True, check=False
        )
        counted = re.search(r"(\d+) requests in ([\d.]+)s", done.stdout)
        if counted is None:
            raise HarnessError(
                f"{self._settings.wrk} did not measure: {done.stdout[-300:]}{done.stderr[-300:]}"
            )
        bad = re.search(r"Non-2xx or 3xx responses: (\d+)", done.stdout)
        failed = int(bad[1]) if bad else 0
        return Loaded(
            first_ms=array("d"),
            chunk_ms=array("d"),
            seconds=float(counted[2]),
            requests=int(counted[1]) - failed,
            errors=failed,
            first_error="status above 399" if failed else "",
        )


def _rows(streams: int, turns: Mapping[str, Sequence[Turn]], load_cores: int) -> list[Row]:
    """The figures of all contenders, from their turns. Pure."""
    direct = turns[DIRECT]
    rows = []
    for name, mine in turns.items():
        by_phase: dict[Phase, list[Turn]] = {p: [t for t in mine if t.phase == p] for p in PHASES}
        memory = [turn.rss_mb for turn in mine if turn.rss_mb is not None]
        rows.append(
            Row(
                router=name,
                streams=streams,
                added_ttft_ms_p50=_added(mine, direct, "first_ms", 50),
                added_ttft_ms_p99=_added(mine, direct, "first_ms", 99),
                added_chunk_ms_p50=_added(mine, direct, "chunk_ms", 50),
                added_chunk_ms_p99=_added(mine, direct, "chunk_ms", 99),
                rps=_rate(by_phase["whole"]),
                chunks_per_s=_rate(by_phase["burst"] or by_phase["paced"]),
                cpu_us_per_request=_cpu_us(by_phase["whole"]) if memory else None,
                cpu_us_per_chunk=_cpu_us(by_phase["paced"]) if memory else None,
                rss_mb=round(max(memory), 1) if memory else None,
                load_busy=round(max(turn.load_cpu_s / turn.loaded.seconds for turn in mine) / load_cores, 2),
                errors=sum(turn.loaded.errors for turn in mine),
                first_error=next((t.loaded.first_error for t in mine if t.loaded.first_error), ""),
            )
        )
    return rows


def _rate(turns: Sequence[Turn]) -> float | None:
    """Per second: the median of the rounds. None: nothing was measured."""
    return round(statistics.median(turn.done / turn.loaded.seconds for turn in turns), 1) if turns else None


def _cpu_us(turns: Sequence[Turn]) -> float | None:
    """Processor time of each request or chunk, over all rounds: its clock ticks every 10 ms."""
    count = sum(turn.done for turn in turns)
    return round(sum(turn.router_cpu_s for turn in turns) / count * 1e6, 1) if count else None


def _added(mine: Sequence[Turn], direct: Sequence[Turn], times: str, percent: int) -> float | None:
    """Of paced streams. None for direct access itself, and where nothing was measured."""
    own, other = _percentile(mine, times, percent), _percentile(direct, times, percent)
    return None if mine is direct or own is None or other is None else round(own - other, 3)


def _percentile(turns: Sequence[Turn], times: str, percent: int) -> float | None:
    found: list[float] = sorted(
        ms for turn in turns if turn.phase == "paced" for ms in getattr(turn.loaded, times)
    )
    return found[len(found) * percent // 100] if found else None


if __name__ == "__main__":
    script(main, __doc__)
