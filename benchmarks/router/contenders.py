"""The routers that are measured, each a process of its own on a core of its own, before the same workers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from benchmarks.processes import accepts, free_ports, server
from benchmarks.router.load import PATH
from benchmarks.router.mock import MODEL
from benchmarks.router.native.instruments import Instruments
from pdserve.discovery.host_socket import new_name
from pdserve.settings.toml_text import to_toml
from pdserve.tls.contexts import TlsConfig

OURS: Final = "pdserve"
OURS_TLS: Final = "pdserve-tls"
"""Ours, with TLS to its workers."""
OURS_REDIS: Final = "pdserve-redis"
"""Ours, which shares sessions and tenants' limits with another router."""
OURS_TWO: Final = "pdserve-two"
"""Ours, of two processes."""
OURS_UNIX: Final = "pdserve-unix"
"""Ours, with Unix sockets to its workers."""
OURS_ALL: Final = (OURS, OURS_TLS, OURS_REDIS, OURS_TWO, OURS_UNIX)
ASK_TIMEOUT_S: Final = 5.0


class Workers(NamedTuple):
    """The ports of the mock workers, and what our router is to do beside."""

    prefill: int
    decode: int
    ca: Path | None = None
    """The authority of the workers' certificates; None: no TLS."""
    keeps_sessions: bool = False
    """Each request has a session, and its tenant has limits that it never reaches."""
    redis: Path | None = None
    """The socket of the Redis in which these are shared."""
    processes: int = 1
    """Of our router."""


class Server(NamedTuple):
    """Who is measured, or a mock worker; without processes where no router is between."""

    name: str
    port: int
    processes: tuple[psutil.Process, ...] = ()

    def cpu_s(self) -> float:
        """Processor time it has used."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(each.user + each.system for each in times))

    def rss_mb(self) -> float | None:
        """Memory it has now, in 10^6 bytes. None: nothing runs."""
        used = [process.memory_info().rss for process in self.processes]
        return sum(used) / 1e6 if used else None


def _ours(port: int, workers: Workers, directory: Path) -> list[str]:
    scheme, name = ("http", OURS) if workers.ca is None else ("https", OURS_TLS)
    config: dict[str, Any] = {
        "port": port,
        "prefill": [f"{scheme}://127.0.0.1:{workers.prefill}"],
        "decode": [f"{scheme}://127.0.0.1:{workers.decode}"],
        "log_level": "warning",
        "min_prefill_tokens": 0,  # every request has both stages, as at the others
        "tls": {} if workers.ca is None else {"ca": str(workers.ca)},
        "processes": workers.processes,
    }
    if workers.keeps_sessions:
        config["session"] = {"sources": ["messages"]}
        config["tenant_defaults"] = {"requests_s": 1e9, "tokens_min": 10**12, "concurrency": 100_000}
    if workers.redis is not None:
        name = OURS_REDIS
        config["redis"] = {"url": f"unix://{workers.redis}"}
    file = directory / f"{name}-{port}.toml"
    file.write_text(to_toml(config))
    return [sys.executable, "-m", "pdserve", "router", "--config", str(file)]


def _rust(
    name: str, mode: Sequence[str], bootstrap: Sequence[str], log_level: str
) -> Callable[[int, Workers, Path], list[str]]:
    """The Rust routers come from one root, and their options differ little."""

    def command(port: int, workers: Workers, directory: Path) -> list[str]:
        (metrics,) = free_ports(1)
        return [
            shutil.which(name) or name,
            *mode,
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
            *("--prefill", f"http://127.0.0.1:{workers.prefill}", *bootstrap),
            *("--decode", f"http://127.0.0.1:{workers.decode}"),
            *("--policy", "round_robin", "--log-level", log_level),
        ]

    return command


COMMANDS: Final[dict[str, Callable[[int, Workers, Path], list[str]]]] = {
    OURS: _ours,
    OURS_TLS: _ours,
    OURS_REDIS: _ours,
    OURS_TWO: _ours,
    OURS_UNIX: _ours,
    "sglang-router": _rust("sglang-router", ("launch", "--pd-disaggregation"), ("8998",), "warn"),
    "smg": _rust("smg", ("launch", "--pd-disaggregation"), ("8998",), "warn"),
    "vllm-router": _rust("vllm-router", ("--vllm-pd-disaggregation",), (), "warning"),
}


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started in the block keeps to these cores; so does this process until the block ends."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def mock_worker(
    role: str,
    directory: Path,
    tls: TlsConfig | None = None,
    instruments: Instruments | None = None,
    has_host_socket: bool = False,
) -> Iterator[Server]:
    """A worker that answers: with the certificate of `tls`, or compiled where there are `instruments`, which
    speak no TLS. A compiled one can listen on a Unix socket, too. Raises BenchError.
    """
    (port,) = free_ports(1)
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.router.mock", str(port), role]
    log = directory / f"{role}.log"
    if tls is not None:
        command = [*command, str(tls.certificate), str(tls.key)]
        log = directory / f"{role}-tls.log"
    elif instruments is not None:
        command = instruments.worker_command(port, role, new_name(port) if has_host_socket else "")
    ready = accepts if tls is not None else answers
    with server(f"the mock {role} worker", command, log, lambda: ready(port)) as made:
        yield Server(role, port, (psutil.Process(made.pid),))


@contextmanager
def contender(name: str, workers: Workers, directory: Path, cores: set[int]) -> Iterator[Server]:
    """A router that answers, on these cores. Raises BenchError."""
    (port,) = free_ports(1)
    command = COMMANDS[name](port, workers, directory)
    with ExitStack() as running:
        with on_cores(cores):
            made = running.enter_context(
                server(name, command, directory / f"{name}-{port}.log", lambda: answers(port))
            )
        first = psutil.Process(made.pid)
        more = first.children(recursive=True) if workers.processes > 1 else []
        yield Server(name, port, (first, *more))


def answers(port: int) -> bool:
    """Whether a chat request is answered there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_TIMEOUT_S)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def installed(name: str) -> bool:
    """Whether the command is found."""
    return name in OURS_ALL or shutil.which(name) is not None
