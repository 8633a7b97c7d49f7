"""What a chaos run works on: nodes behind relays, workers, and the records they make."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.security.tokens import Secret
from tests.chaos.plan import Plan
from tests.chaos.records import Disturbed, Ended, Record, to_line
from tests.chaos.worker import COLUMNS, NAMESPACE, WRITE_TOKEN, WorkerConfig
from tests.support.kvpool import made_pages as p
from tests.support.kvpool.node_processes import NodeProcess, await_settled, client_of, pool_of
from tests.support.processes import Child, client, free_ports
from tests.support.relays import Relay, relays

ADMIN_TOKEN: Final = "chaos-may-do-everything"
CLUSTER_TOKEN: Final = "chaos-is-one-pool"
CAPACITY_BYTES: Final = 128 << 20  # of each node
SEGMENT_BYTES: Final = 2 << 20
TIER_SHARE: Final = 2  # times the memory: nothing leaves the tier
LEASE_S: Final = 5.0
TIMEOUTS: Final = {
    "connect_timeout_s": 3.0,
    "exists_timeout_s": 1.0,
    "get_timeout_s": 2.0,
    "put_timeout_s": 2.0,
}
RESTART_WAIT_S: Final = 15.0  # an upgrade takes long while nodes and clients share two cores
READY_TIMEOUT_S: Final = 60.0
OWNED_SHARE: Final = 0.4  # of the memory: nothing is evicted unless a fault wants it so
OWNED_S: Final = 50.0  # pages a second that a writer writes at most
SHARED: Final = 300  # pages in each of the zones that all write
OPERATIONS_S: Final = 40.0  # of each thread
MEAN_SLOT_BYTES: Final = (sum(p.SHAPES[0]) * (p.LARGE_EVERY - 1) + sum(p.SHAPES[1])) // p.LARGE_EVERY
STARVING_EVERY_S: Final = 0.5
STARVED_SHARE: Final = 0.5  # of that time


class Line(msgspec.Struct, frozen=True):
    """A kind of worker."""

    name: str
    data_path: str
    checksum: bool
    threads: int


LINES: Final = (
    Line("client-shm", "shm", True, 2),
    Line("client-ucx", "ucx", True, 2),
    Line("client-tcp", "tcp", True, 1),
    Line("client-shm-bare", "shm", False, 1),  # without checksums: a torn page would be handed out
    Line("client-ucx-bare", "ucx", False, 1),
)


class WorkerProcess(Child):
    """A worker that can be killed and replaced."""

    def __init__(self, config: WorkerConfig, directory: Path) -> None:
        child = client(config, directory, "tests.chaos.worker")
        super().__init__(child.name, child.command, child.log_path)
        self.output = Path(config.output)
        self._directory = directory
        self._config = config
        self._lock = threading.Lock()

    def await_ready(self) -> None:
        """Raises HarnessError."""
        self.await_true(Path(self._config.ready).exists, READY_TIMEOUT_S)

    def replace(self) -> None:
        """kill -9, and another in its place, once that is ready. A line that the killed one had begun to
        write is cut off. Raises HarnessError.
        """
        with self._lock:
            self.kill()
            Path(self._config.ready).unlink(missing_ok=True)
            lines = self.output.read_bytes() if self.output.exists() else b""
            with self.output.open("r+b" if lines else "wb") as file:
                file.truncate(lines.rfind(b"\n") + 1)
            incarnation = self._config.incarnation + 1
            self._config = msgspec.structs.replace(self._config, incarnation=incarnation)
            client(self._config, self._directory, "tests.chaos.worker")
            self.spawn()
            self.await_ready()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP, SIGCONT; nobody replaces it meanwhile."""
        with self._lock:
            self.process.send_signal(signal.SIGSTOP)
            try:
                yield
            finally:
                self.process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        with self._lock:
            self.process.terminate()


@dataclass
class Field:
    """All of it. `stop` is set when the run is over: faults under way repair what they did at once.
    `visitor(name)` makes another node of the pool, not started yet.
    """

    seed: int
    directory: Path
    nodes: list[NodeProcess]
    relays: list[Relay]
    workers: list[WorkerProcess]
    visitor: Callable[[str], NodeProcess]
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.output = self.directory / "faults.jsonl"
        self.ring = Ring([NodeAddress(node.name, node.address) for node in self.nodes])

    def note(self, record: Record) -> None:
        """Thread-safe."""
        with self._lock, self.output.open("ab") as file:
            file.write(to_line(record))

    def tier_of(self, node: NodeProcess) -> Path:
        """The directory of its SSD tier."""
        return self.directory / "tiers" / node.name

    def killed(self, node: NodeProcess) -> None:
        """It is about to be: if it died by itself before, that is noted."""
        if node.died:
            self.note(Ended(node.name, False, node.died))

    def owner(self, page: int) -> str:
        """Name of the node that owned the page when the run began."""
        return self.ring.owner(p.key_of(self.seed, page)).node

    def settle(self) -> None:
        """Wait until the nodes are one pool again, unless another fault is at work. Raises HarnessError."""
        await_settled(self.nodes)

    def direct(self, **changes: Any) -> PoolClientConfig:
        """A client that reaches every node past the relays, and may make namespaces."""
        return client_of(self.nodes, **{"token": ADMIN_TOKEN, **TIMEOUTS, **changes})


@contextmanager
def set_up(plan: Plan, directory: Path) -> Iterator[Field]:
    """Start the nodes and workers in `directory`; whatever happens, none is left. Raises HarnessError."""
    ports = free_ports(plan.nodes)

    def tiers(name: str) -> dict[str, Any]:
        options = {"segment_bytes": SEGMENT_BYTES}
        capacity_bytes = CAPACITY_BYTES * TIER_SHARE
        tier = {
            "kind": "ssd",
            "path": directory / "tiers" / name,
            "capacity_bytes": capacity_bytes,
            "write": "all",
        }
        return {"tiers": [{**tier, "options": options}]}

    settings: dict[str, Any] = {
        "capacity_bytes": CAPACITY_BYTES,
        "lease_s": LEASE_S,
        "keep": False,
        "admin_token": ADMIN_TOKEN,
        "cluster": {"token": CLUSTER_TOKEN},
        "namespaces": [{"name": NAMESPACE, "write_token": WRITE_TOKEN}],
    }
    with ExitStack() as stack:
        ways = stack.enter_context(relays([("127.0.0.1", port) for port in ports]))
        addresses = [way.address for way in ways]
        nodes = stack.enter_context(pool_of(plan.nodes, directory, settings, ports, addresses, tiers))

        def visitor(name: str) -> NodeProcess:
            address = f"tcp:127.0.0.1:{free_ports(1)[0]}"
            cluster = {**settings["cluster"], "peers": addresses, "advertise": address}
            return NodeProcess(
                name, directory, {**settings, **tiers(name), "listen": [address], "cluster": cluster}
            )

        refs = [
            PoolNodeRef(node=node.name, address=one.address) for node, one in zip(nodes, ways, strict=True)
        ]
        workers = _workers(plan, refs, directory)
        for worker in workers:
            stack.callback(worker.kill)
            worker.spawn()
        for worker in workers:
            worker.await_ready()
        yield Field(plan.seed, directory, nodes, ways, workers, visitor)


def _workers(plan: Plan, nodes: Sequence[PoolNodeRef], directory: Path) -> list[WorkerProcess]:
    """Not started yet."""
    writers = sum(line.threads for line in LINES)
    board = directory / "board"
    board.write_bytes(np.zeros((writers, COLUMNS), np.int64).tobytes())
    owned = int(CAPACITY_BYTES * len(nodes) * OWNED_SHARE / MEAN_SLOT_BYTES / writers)
    made, first = [], 0
    for number, line in enumerate(LINES):
        turned = number % len(nodes)  # each speaks with another one first
        own = {
            **TIMEOUTS,
            "nodes": [msgspec.structs.asdict(ref) for ref in (*nodes[turned:], *nodes[:turned])],
            "data_path": line.data_path,
            "checksum": line.checksum,
            "restart_wait_s": RESTART_WAIT_S,
            "token": Secret(WRITE_TOKEN),
        }
        config = WorkerConfig(
            name=line.name,
            seed=plan.seed,
            client=msgspec.convert(own, PoolClientConfig),
            writers=list(range(first, first + line.threads)),
            all_writers=writers,
            owned=owned,
            owned_s=min(OWNED_S, owned / (plan.minutes * 60)),
            shared=SHARED,
            operations_s=OPERATIONS_S,
            damaged=line.checksum,
            board=str(board),
            output=str(directory / f"{line.name}.jsonl"),
            ready=str(directory / f"{line.name}.ready"),
        )
        made.append(WorkerProcess(config, directory))
        first += line.threads
    return made


@contextmanager
def watching(field: Field) -> Iterator[None]:
    """Note when a node waits for a processor for most of the time: nothing can be told about the pool then.

    /proc/PID/schedstat counts how long a process's main thread, a node's event loop, was ready to run and did
    not (Documentation/scheduler/sched-stats.rst). Where there is no such file nothing is noted.
    """
    enough = threading.Event()

    def watch() -> None:
        before: dict[int, float] = {}
        at_s = time.monotonic()
        while not enough.wait(STARVING_EVERY_S):
            now_s = time.monotonic()
            waited = {node.name: (node.pid, _waited_s(node.pid)) for node in field.nodes}
            for name, (pid, waited_s) in waited.items():
                if waited_s - before.get(pid, waited_s) > STARVED_SHARE * (now_s - at_s):
                    field.note(Disturbed(at_s, now_s, "starved", name))
            before = dict(waited.values())
            at_s = now_s

    thread = threading.Thread(target=watch, name="chaos-starving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _waited_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0  # it is gone
