"""Real processes for the end-to-end tests: pool nodes, SGLang workers, routers, each started by its own
command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from pdserve.settings.config_file import to_toml
from pdserve.up.launchers.sessions import session_members
from pdserve.up.locks import is_free
from tests.support.e2e import warm
from tests.support.left_behind import reaper
from tests.support.processes import free_ports

START_TIMEOUT_S = 600.0  # a machine may have more to do
STOP_TIMEOUT_S = 20.0

# One for all: a new client reads the certificates of the web's authorities, 50 ms of a core, and tests ask
# often. No connection is kept, since a server may end meanwhile.
http = httpx.Client(
    timeout=30.0, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
)


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    return free_ports(1)[0]


def eventually(condition: Callable[[], bool], what: str, timeout_s: float, poll_s: float = 0.05) -> None:
    """Poll until the condition holds. Raises AssertionError naming `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)


@dataclass
class Process:
    """A running command, its log file, and how to tell that it is ready."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | warm.WarmProcess | None = None

    def start_warm(self, words: list[str]) -> Process:
        """By the warm server, as the command with these words."""
        self.popen = warm.WarmProcess(warm.server(), words, str(self.log), self.env)
        reaper().watch(self.popen.pid)
        return self

    def start(self) -> Process:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.argv,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        reaper().watch(self.popen.pid)
        return self

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        assert self.popen is not None

        def check() -> bool:
            self.assert_running()
            return ready()

        try:
            eventually(check, f"{self.name} ready", timeout_s, 0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def assert_running(self) -> None:
        assert self.popen is not None
        if self.popen.poll() is not None:
            raise AssertionError(f"{self.name} exited with {self.popen.returncode}:\n{self.tail()}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the process itself (not its children) and wait for its end."""
        assert self.popen is not None
        self.popen.send_signal(number)
        self.popen.wait(STOP_TIMEOUT_S)
        if not session_members(self.popen.pid):
            reaper().forget(self.popen.pid)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group; idempotent."""
        if self.popen is None:
            return
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
        self.end()

    def end(self) -> None:
        """SIGKILL to the whole group; idempotent."""
        if self.popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(STOP_TIMEOUT_S)
        reaper().forget(self.popen.pid)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def pdserve(*words: str) -> list[str]:
    return [sys.executable, "-m", "pdserve", *words]


def http_ok(url: str) -> bool:
    try:
        return http.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric over the labels that are not given, at a server's /metrics."""
    total, wanted = 0.0, [f'{label}="{value}"' for label, value in labels.items()]
    for line in http.get(f"{url}/metrics", timeout=10.0).text.splitlines():
        key, _, value = line.rpartition(" ")
        if key.partition("{")[0] == name and all(one in key for one in wanted):
            total += float(value)
    return total


class Started:
    """Of processes that tests start and stop: `with` them."""

    process: Process | None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Any:
        raise NotImplementedError

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    @property
    def popen(self) -> subprocess.Popen[bytes] | warm.WarmProcess:
        assert self.process is not None
        assert self.process.popen is not None
        return self.process.popen


@dataclass
class PoolNode(Started):
    """A pool node on a Unix socket in `directory`, restartable on the same arena."""

    directory: Path
    name: str = "pool0"
    capacity: str = "512MiB"
    extra: dict[str, Any] = field(default_factory=dict)
    process: Process | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.directory}/{self.name}.sock"

    @property
    def ref(self) -> dict[str, Any]:
        return {"node": self.name, "address": self.address}

    @property
    def arena(self) -> Path:
        """The file of its pages."""
        return self.directory / "arena" / self.name / "arena"

    def start(self) -> PoolNode:
        return self.begin().wait_ready()

    def begin(self) -> PoolNode:
        """Start without waiting; see `wait_ready`."""
        config = {
            "name": self.name,
            "listen": [self.address],
            "capacity_bytes": self.capacity,
            "arena_dir": self.directory / "arena",
            **self.extra,
        }
        path = self.directory / f"{self.name}.toml"
        path.write_text(to_toml(config))
        self.process = Process(
            self.name, pdserve("pool", "serve", "--config", str(path)), self.directory / f"{self.name}.log"
        ).start()
        return self

    def wait_ready(self) -> PoolNode:
        assert self.process is not None
        self.process.wait_ready(self._answers, 120.0)
        return self

    def _answers(self) -> bool:
        return self.status() is not None

    def status(self) -> Any:
        """The node's StatusReport, or None when it does not answer."""
        from pdserve.errors import PoolError
        from pdserve.kvpool.protocol import messages as m
        from pdserve.kvpool.transports.control import ControlChannel, make_hello

        deadline = time.monotonic() + 5.0
        try:
            channel = ControlChannel.connect(self.address, make_hello("test", "", "none"), deadline)
        except PoolError:
            return None
        try:
            report = channel.call(m.Status(1), deadline)
        finally:
            channel.close()
        assert isinstance(report, m.StatusReport), report
        return report


@dataclass
class Worker(Started):
    """A `pdserve prefill|decode|agg|elastic` process, or plain SGLang through `role="plain"`."""

    role: str
    name: str
    directory: Path
    engine: dict[str, Any]
    pool: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_cold: bool = False
    """Started by its own command, as users start it, and not by the warm server."""
    port: int = field(default_factory=free_port)
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Worker:
        """Start without waiting; see `wait_ready`."""
        if self.process is None and not is_free("127.0.0.1", self.port):
            self.port = free_port()  # another process has taken that one
        config = {
            "insecure": True,
            **self.settings,
            "engine": {**self.engine, "port": self.port},
            "pool": self.pool,
        }
        path = self.directory / f"{self.name}.toml"
        path.write_text(to_toml(config))
        words = [self.role, "--config", str(path)]
        log, env = self.directory / f"{self.name}.log", {"OMP_NUM_THREADS": warm.THREADS}
        self.process = Process(self.name, pdserve(*words), log, env)
        if self.is_cold:
            self.process.start()
        else:
            self.process.start_warm(words)
        return self

    def wait_ready(self) -> Worker:
        assert self.process is not None
        self.process.wait_ready(lambda: http_ok(f"{self.url}/pd/ready"))
        return self

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.is_running

    def assert_running(self) -> None:
        assert self.process is not None
        self.process.assert_running()

    def end(self) -> None:
        """At once, without a drain."""
        if self.process is not None:
            self.process.end()

    def generate(
        self, input_ids: list[int], max_new_tokens: int, *, headers: Any = None, **more: Any
    ) -> dict[str, Any]:
        """SGLang's own /generate, greedy, with the log-probability of each output token."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **more}
        answer = http.post(f"{self.url}/generate", json=body, headers=headers, timeout=120.0)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def flush(self) -> None:
        """Empty SGLang's own caches, device and host; the pool keeps its pages."""

        def flushed() -> bool:
            return http.post(f"{self.url}/flush_cache", timeout=10.0).status_code == 200

        eventually(flushed, f"{self.name} idle and flushed", 15.0, 0.1)

    @property
    def namespace(self) -> tuple[str, dict[str, str]]:
        """(name, geometry) of its pages."""
        info = http.get(f"{self.url}/pd/info").json()
        return info["namespace"], info["kv_geometry"]

    def has_settled(self, request_id: str) -> bool:
        """All pages of an earlier request are in the pool, within seconds."""
        question = {"request_id": request_id, "timeout_s": 10.0}
        return bool(http.post(f"{self.url}/pd/settled", json=question, timeout=20.0).json()["settled"])

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """While the block runs, its process stands still."""
        self.popen.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.popen.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def started(pool: PoolNode, *workers: Worker) -> Iterator[None]:
    """A pool node, and workers that start together."""
    try:
        pool.start()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_ready()
        yield
    finally:
        for one in (*workers, pool):
            one.stop()


@dataclass
class Router(Started):
    """A `pdserve router` process."""

    directory: Path
    prefill: list[Worker] = field(default_factory=list)
    decode: list[Worker] = field(default_factory=list)
    agg: list[Worker] = field(default_factory=list)
    elastic: list[Worker] = field(default_factory=list)
    name: str = "router"
    extra: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lacks(self) -> list[str]:
        """The workers that the router does not use now."""
        workers = http.get(f"{self.url}/ready").json()["workers"]
        return [worker["id"] for worker in workers if not worker["ready"]]

    def start(self) -> Router:
        # also short prompts have both stages
        config: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "min_prefill_tokens": 0,
            **self.extra,
        }
        # tests read in the head of a stream what is known at its first token, however busy the machine is
        config["deadlines"] = {"early_head_s": 60.0, **config.get("deadlines", {})}
        for role in ("prefill", "decode", "agg", "elastic"):
            urls = [worker.url for worker in getattr(self, role)]
            if urls:
                config[role] = urls
        path = self.directory / f"{self.name}.toml"
        path.write_text(to_toml(config))
        self.process = Process(
            self.name, pdserve("router", "--config", str(path)), self.directory / f"{self.name}.log"
        ).start()
        self.process.wait_ready(lambda: http_ok(f"{self.url}/ready"), 120.0)
        return self
