"""Pool nodes as processes: started by the command line, to be measured, killed and paused."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from pdserve.errors import PoolError
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol.cluster_messages import ACTIVE
from pdserve.kvpool.protocol.messages import DataPathChoice, StatusReport
from pdserve.kvpool.transports.base import Connection
from pdserve.security.tls import Certificates, TlsConfig
from pdserve.settings.config_file import to_toml
from tests.support.kvpool.connectors import connect, fetch_status
from tests.support.processes import Child, HarnessError, free_ports

START_TIMEOUT_S: Final = 60.0  # allocating many GiB takes a while
STOP_TIMEOUT_S: Final = 20.0
ASK_TIMEOUT_S: Final = 2.0
SETTLE_TIMEOUT_S: Final = 30.0


class NodeProcess(Child):
    """One node. It listens on a Unix socket in `directory` and wherever `settings` say."""

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        arena_dir: Path | None = None,
        data_path: DataPathChoice = "shm",
        tls: TlsConfig | None = None,
    ) -> None:
        """`settings` as in the node's configuration file, but for its name and arena. `arena_dir`: one that
        it is not to remove. `data_path`, `tls`: of those who `connect`.
        """
        self.file = directory / f"{name}.toml"
        command = [sys.executable, "-m", "pdserve", "pool", "serve", "--config", str(self.file)]
        super().__init__(name, command, directory / f"{name}.log")
        self.address = f"unix:{directory}/{name}.sock"
        self.data_path = data_path
        self._tls = Certificates(tls or TlsConfig()).client_context
        self._owns_arena = arena_dir is None
        self._arena = arena_dir or Path(tempfile.mkdtemp(prefix="pdserve-bench-", dir=memory_dir()))
        self._killed = False
        self.write(settings)

    def write(self, settings: Mapping[str, Any]) -> None:
        """What counts from its next start, or its next upgrade, on."""
        listen = [*(one for one in settings.get("listen", ()) if one != self.address), self.address]
        whole = {**settings, "name": self.name, "arena_dir": self._arena, "listen": listen}
        self.file.write_text(to_toml(whole))

    @property
    def arena_path(self) -> Path:
        return self._arena / self.name / "arena"

    def start(self) -> float:
        """Start it and wait until it answers; how long that took, in s. Raises HarnessError."""
        began = time.monotonic()
        self.spawn()
        return self.await_ready() - began

    def spawn(self, **options: Any) -> None:
        self._killed = False
        super().spawn(**options)

    def await_ready(self) -> float:
        """Wait until it answers; when that was. Raises HarnessError."""
        self.await_true(self._answers, START_TIMEOUT_S)
        return time.monotonic()

    def _answers(self) -> bool:
        try:
            self.status()
        except PoolError:
            return False
        return True

    def connect(self, *, checksum: bool = True, timeout_s: float = 5.0) -> Connection:
        """Raises PoolError."""
        deadline_s = time.monotonic() + timeout_s
        return connect(self.address, deadline_s, self.data_path, checksum=checksum, tls=self._tls)

    def flip_bit(self, offset: int) -> None:
        """Damage its memory behind its back."""
        np.memmap(self.arena_path, dtype=np.uint8, mode="r+")[offset] ^= 1

    def forget_memory(self) -> None:
        """What a reboot does to the arena. The node must not run."""
        shutil.rmtree(self.arena_path.parent, ignore_errors=True)

    def status(self) -> StatusReport:
        """Raises PoolUnavailable, PoolTimeout, PoolRefused."""
        return fetch_status(self.address, time.monotonic() + ASK_TIMEOUT_S)

    def kill(self) -> None:
        """kill -9."""
        self._killed = self.runs
        super().kill()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, within_s: float = STOP_TIMEOUT_S) -> bool:
        return super().stop(within_s)

    @property
    def died(self) -> str:
        """How it ended if nobody made it, else nothing."""
        code = None if self._process is None or self._killed else self._process.poll()
        return f"it died of {signal.Signals(-code).name}" if code is not None and code < 0 else ""

    def close(self) -> None:
        """Whatever state it is in: no process and no memory are left."""
        if self.runs:
            self.kill()
        if self._owns_arena:
            shutil.rmtree(self._arena, ignore_errors=True)


@contextmanager
def pool_of(
    count: int,
    directory: Path,
    settings: Mapping[str, Any],
    ports: Sequence[int] = (),
    advertised: Sequence[str] = (),
    own_settings: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> Iterator[list[NodeProcess]]:
    """`count` nodes that are one pool, named node0 and so on, each listening on a TCP port of the loopback
    address (`ports`, else free ones). `advertised`: addresses that others reach them by, where not those.
    `own_settings(name)`: of one node. Raises HarnessError.
    """
    chosen = list(ports) or free_ports(count)
    listening = [f"tcp:127.0.0.1:{port}" for port in chosen]
    reached = list(advertised) or listening
    with ExitStack() as stack:
        nodes = []
        for index in range(count):
            name = f"node{index}"
            cluster = {**settings.get("cluster", {}), "peers": reached, "advertise": reached[index]}
            own = {**own_settings(name), "listen": [listening[index]], "cluster": cluster}
            nodes.append(NodeProcess(name, directory, {**settings, **own}))
            stack.callback(nodes[-1].close)
            nodes[-1].spawn()
        for node in nodes:
            node.await_ready()
        await_settled(nodes)
        yield nodes


def client_of(
    nodes: Sequence[NodeProcess], data_path: DataPathChoice = "shm", **changes: Any
) -> PoolClientConfig:
    """A client of these nodes. `changes`: other settings than the usual ones."""
    refs = [PoolNodeRef(node=node.name, address=node.address) for node in nodes]
    return PoolClientConfig(nodes=refs, data_path=data_path, **changes)


def await_settled(nodes: Sequence[NodeProcess], within_s: float = SETTLE_TIMEOUT_S) -> float:
    """Wait until the nodes know each other and nothing moves between them; how long that took, in s. Raises
    HarnessError.
    """
    began = time.monotonic()
    while (problem := _unsettled(nodes)) is not None:
        if time.monotonic() > began + within_s:
            raise HarnessError(f"the nodes did not become one pool within {within_s:.0f} s: {problem}")
        time.sleep(0.05)
    return time.monotonic() - began


def _unsettled(nodes: Sequence[NodeProcess]) -> str | None:
    names = {node.name for node in nodes}
    seen = set()
    for node in nodes:
        try:
            report = node.status()
        except PoolError as error:
            return str(error)
        active = {member.node for member in report.members if member.status == ACTIVE}
        if not names <= active:
            return f"{node.name} knows {', '.join(sorted(active)) or 'nobody'}"
        if any(member.settled < report.epoch for member in report.members if member.status == ACTIVE):
            return f"{node.name} sees pages move"
        seen.add((report.epoch, *sorted(active)))
    return None if len(seen) == 1 else f"they see {sorted(seen)}"


def memory_dir() -> Path | None:
    """Where arenas go: memory, where there is such a directory."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None
