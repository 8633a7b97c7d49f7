"""Clusters that a benchmark starts for itself with `pdserve up`, and stops."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import psutil

from benchmarks.node_processes import memory_dir
from benchmarks.origin import installed
from benchmarks.peers.mooncake import mooncake_servers
from benchmarks.processes import Child
from benchmarks.serving.contenders import DEAD, NEED_MOONCAKE, Setting, contender
from benchmarks.serving.foreign import (
    DYNAMO,
    DYNAMO_ENVIRONMENT,
    DYNAMO_PORTS,
    ENVIRONMENTS,
    VLLM,
    VLLM_ENVIRONMENT,
    dynamo_argv,
    vllm_contender,
)
from benchmarks.stores import BenchError
from pdserve.settings.toml_text import to_toml
from pdserve.sizes import parse_bytes
from pdserve.up.claims import free_ports, is_free
from pdserve.up.places.orphan_reaper import OrphanReaper

CHECKOUT: Final = Path(__file__).parents[3]
START_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
LAST_LINES: Final = 12
PREFIX: Final = "pdserve-serving-"


@contextmanager
def workplace(out: Path | None) -> Iterator[tuple[str, str]]:
    """(directory of logs and configuration, directory in memory for pools) until the block ends; the first
    one is `out` where that is given, and stays.
    """
    forget_dead()
    mine = f"{PREFIX}{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=mine, ignore_cleanup_errors=True) as own,
        tempfile.TemporaryDirectory(prefix=mine, dir=memory_dir(), ignore_cleanup_errors=True) as memory,
    ):
        yield str((out or Path(own)).resolve()), memory


def forget_dead() -> None:
    """Remove the directories of benchmarks that were killed without time to do it themselves."""
    for parent in {Path(tempfile.gettempdir()), memory_dir() or Path(tempfile.gettempdir())}:
        for left in parent.glob(f"{PREFIX}*-*"):
            owner = left.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                shutil.rmtree(left, ignore_errors=True)


def environments_of(names: Collection[str]) -> dict[str, dict[str, str]]:
    """The environments that contenders have beside ours, and the versions of what they measure there."""
    return {
        environment: installed(packages, CHECKOUT / environment)
        for environment, (owners, packages) in ENVIRONMENTS.items()
        if not {*owners}.isdisjoint(names)
    }


@contextmanager
def launched(name: str, setting: Setting) -> Iterator[str]:
    """A contender's cluster, ready, until the block ends; where to ask it. Raises BenchError."""
    ports = free_ports("127.0.0.1", random.SystemRandom())
    directory = Path(setting.directory) / name
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "pages").mkdir(parents=True)
    with ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, directory / "pages", ignore_errors=True)
        cleaning.callback(shutil.rmtree, Path(setting.arena_directory) / name, ignore_errors=True)
        master = ""
        if name in NEED_MOONCAKE:
            servers = mooncake_servers(parse_bytes(setting.pool_capacity), directory)
            master = cleaning.enter_context(servers)
        start = _dynamo(name, setting, ports) if name in DYNAMO else _by_up(name, setting, ports, master)
        reaper = OrphanReaper()  # ends the cluster should this process be killed
        cleaning.callback(reaper.close)
        up = Child(name, start.command, directory / "up.log")
        up.spawn(stdin=subprocess.DEVNULL, start_new_session=True)
        reaper.watch(up.pid)
        cleaning.callback(_stop, up.process, reaper)
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            ready = partial(_ready, http, start.ready_url) if start.ready_url else partial(_says_ready, up)
            up.await_true(ready, START_TIMEOUT_S, poll_s=0.2, last_lines=LAST_LINES)
        if name == DEAD:
            _kill_pool(up.pid)
        yield start.url


class _Start(NamedTuple):
    """`command` serves at `url` once a GET of `ready_url` is answered 200. Without one it says so."""

    command: list[str]
    url: str
    ready_url: str


def _by_up(name: str, setting: Setting, ports: Iterator[int], mooncake_master: str) -> _Start:
    if name in VLLM:
        python = CHECKOUT / VLLM_ENVIRONMENT / "bin/python"
        if not python.exists():
            raise BenchError(f"{name} needs vLLM: run launch/vllm.sh --set-up")
        chosen = vllm_contender(name, setting, python, next(ports), next(ports))
    else:
        chosen = contender(name, setting, next(ports), next(ports), mooncake_master)
    file = Path(setting.directory, name, "cluster.toml")
    file.write_text(to_toml(chosen.tables))
    command = [sys.executable, "-m", "pdserve", "up", str(file)]
    # the router is the last to start
    return _Start(command, f"http://127.0.0.1:{chosen.port}", f"http://127.0.0.1:{chosen.router_port}/ready")


def _dynamo(name: str, setting: Setting, ports: Iterator[int]) -> _Start:
    script = CHECKOUT / "launch/dynamo.sh"
    if not (CHECKOUT / DYNAMO_ENVIRONMENT / "pdserve-setup").exists():
        raise BenchError(f"{name} needs Dynamo: run {script.relative_to(CHECKOUT)} --set-up in a checkout")
    port = next(port for port in ports if all(is_free("127.0.0.1", port + more) for more in DYNAMO_PORTS))
    url = f"http://127.0.0.1:{port}"
    return _Start(dynamo_argv(name, setting, script, port), url, "")


def _ready(http: httpx.Client, url: str) -> bool:
    """Whether the router says so, which is the last to start."""
    try:
        return http.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def _says_ready(up: Child) -> bool:
    """Whether launch/dynamo.sh does."""
    return "ready: http" in up.log()


def _kill_pool(up: int) -> None:
    nodes = [child for child in psutil.Process(up).children() if "pool" in child.cmdline()]
    for node in nodes:
        node.kill()
    if not nodes or psutil.wait_procs(nodes, STOP_TIMEOUT_S)[1]:
        raise BenchError("the pool node could not be killed")


def _stop(process: subprocess.Popen[bytes], reaper: OrphanReaper) -> None:
    """As an operator would; the reaper ends what that leaves, and all of it where we are told to hurry."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
        reaper.forget(process.pid)
