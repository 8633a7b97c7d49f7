"""Contenders: clusters that a benchmark starts for itself with `pdserve up`, and stops.

A contender is a cluster file `contenders/NAME.toml` (or any other, by its path), merged over
`contenders/base.toml`. Its table `[contender]` is the benchmark's: `url`, where to send requests; `ready`,
what answers 200 once it serves; `needs_mooncake`; or `command` with `env`, in place of `pdserve up`.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
import typer

from pdserve.errors import ConfigError
from pdserve.settings.config_file import to_toml
from pdserve.sizes import parse_bytes
from tests.support.kvpool.node_processes import memory_dir
from tests.support.left_behind import reaper
from tests.support.mooncake import mooncake_servers
from tests.support.processes import Child, HarnessError, free_ports, stopped_cleanly

CHECKOUT: Final = Path(__file__).parents[2]
CONTENDERS: Final = CHECKOUT / "benchmarks/contenders"
DEMO_MODEL: Final = Path("models/demo-small")
RESERVED: Final = "--num-reserved-decode-tokens"
START_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
LAST_LINES: Final = 12

ModelOption = Annotated[
    Path, typer.Option("--model", help="Model directory: see tests/support/random_model.py.")
]
PoolCapacityOption = Annotated[str, typer.Option("--pool-capacity", help="Memory of the pool node.")]
ExtraArgs = Annotated[list[str] | None, typer.Argument(help="Flags of SGLang for all workers, after --.")]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all contenders have in common. `directory` is for logs and configuration, `memory` for arenas.
    `tables` are merged over each contender's.
    """

    model: Path
    directory: Path
    memory: Path
    device_tokens: int
    page_size: int = 64
    pool_capacity: str = "2GiB"
    extra_args: tuple[str, ...] = ()
    tables: Mapping[str, Any] = {}


@contextmanager
def settings_of(
    model: Path, device_tokens: int, extra_args: Sequence[str] | None, out: Path | None = None, **more: Any
) -> Iterator[Settings]:
    """In directories of their own until the block ends; `out` stays. SIGTERM ends the block. Raises
    ConfigError where there is no model.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: no model; make one: python -m tests.support.random_model small {model}"
        )
    with (
        stopped_cleanly(),
        tempfile.TemporaryDirectory(prefix="pdserve-bench-", ignore_cleanup_errors=True) as own,
        tempfile.TemporaryDirectory(
            prefix="pdserve-bench-", dir=memory_dir(), ignore_cleanup_errors=True
        ) as memory,
    ):
        yield Settings(
            model=model.resolve(),
            directory=(out or Path(own)).resolve(),
            memory=Path(memory),
            device_tokens=device_tokens,
            extra_args=tuple(extra_args or ()),
            **more,
        )


def names() -> list[str]:
    """Of the contenders that have a file here."""
    return sorted(file.stem for file in CONTENDERS.glob("*.toml") if file.stem != "base")


def tables_of(
    name: str, settings: Settings, router_port: int, worker_port: int, mooncake: str = ""
) -> dict[str, Any]:
    """A contender's cluster file with `[contender]`. `mooncake`: HOST:PORT. Raises ConfigError."""
    path = CONTENDERS / f"{name}.toml" if name in names() else Path(name)
    values = {
        "name": path.stem,
        "checkout": CHECKOUT,
        "directory": settings.directory / path.stem,
        "memory": settings.memory,
        "model": settings.model,
        "page_size": settings.page_size,
        "device_tokens": settings.device_tokens,
        "device_blocks": settings.device_tokens // settings.page_size + 1,
        "pool_capacity": settings.pool_capacity,
        "extra_args": json.dumps(settings.extra_args),
        "direct_args": json.dumps([*settings.extra_args, RESERVED, str(settings.page_size)]),
        "router_port": router_port,
        "worker_port": worker_port,
        "mooncake": mooncake,
    }
    found: dict[str, Any] = {}
    for file in (CONTENDERS / "base.toml", path):
        try:
            found = _merged(found, tomllib.loads(string.Template(file.read_text()).substitute(values)))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"contender {name}: {file}: {error}; there are {', '.join(names())}") from None
    return _merged(found, settings.tables)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(under)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both_tables else value
    return found


class Contender:
    """A server that runs. `url`: where to send requests."""

    def __init__(self, url: str) -> None:
        self.url = url

    def restart(self) -> None:
        """Raises HarnessError."""
        raise HarnessError(f"{self.url} was not started here, so it is not restarted")


class Cluster(Contender):
    """Processes that were started here."""

    def __init__(self, name: str, own: Mapping[str, Any], command: Sequence[str], log: Path) -> None:
        super().__init__(own["url"])
        self._own = own
        self._up = Child(name, command, log)

    def start(self) -> None:
        """Raises HarnessError where it does not serve in time."""
        environment = {**os.environ, **self._own.get("env", {})}
        self._up.spawn(stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        reaper().watch(self._up.pid)  # ends the cluster should this process be killed
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            self._up.await_true(lambda: _ready(http, self._own["ready"]), START_TIMEOUT_S, 0.2, LAST_LINES)

    def stop(self) -> None:
        """As an operator would; the reaper ends what that leaves when this process ends."""
        process = self._up.process
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            reaper().forget(process.pid)

    def restart(self) -> None:
        """All its processes; what it keeps on disk and in shared memory stays. Raises HarnessError."""
        self.stop()
        self.start()


@contextmanager
def launched(name: str, settings: Settings) -> Iterator[Contender]:
    """A contender by its name, file or URL, ready, until the block ends. Raises HarnessError, ConfigError."""
    if name.startswith(("http://", "https://")):
        yield Contender(name)
        return
    router_port, worker_port = free_ports(2)
    stem = Path(name).stem
    directory = settings.directory / stem
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "pages").mkdir(parents=True)
    with ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, directory / "pages", ignore_errors=True)
        cleaning.callback(shutil.rmtree, settings.memory / stem, ignore_errors=True)
        master = ""
        if tables_of(name, settings, router_port, worker_port)["contender"].get("needs_mooncake"):
            servers = mooncake_servers(parse_bytes(settings.pool_capacity), directory)
            master = cleaning.enter_context(servers)
        tables = tables_of(name, settings, router_port, worker_port, master)
        own = tables.pop("contender")
        file = directory / "cluster.toml"
        file.write_text(to_toml(tables))
        command = own.get("command") or [sys.executable, "-m", "pdserve", "up", str(file)]
        if not Path(command[0]).exists():
            raise HarnessError(f"{name}: {command[0]} is not installed")
        cluster = Cluster(name, own, command, directory / "up.log")
        cleaning.callback(cluster.stop)
        cluster.start()
        yield cluster


def _ready(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == 200
    except httpx.HTTPError:
        return False
