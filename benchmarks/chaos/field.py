"""What a chaos run works on: nodes behind relays, workers, and the records they make."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.boards import new_rows, open_rows
from benchmarks.chaos import pages as p
from benchmarks.chaos.disk import Disk, small_disk
from benchmarks.chaos.moving import NAMESPACE
from benchmarks.chaos.plan import Plan
from benchmarks.chaos.proxy import Relay, relays
from benchmarks.chaos.records import Ended, Record, to_line
from benchmarks.chaos.worker import COLUMNS, MOVERS, READ_TOKEN, WRITE_TOKEN, WorkerConfig
from benchmarks.node_processes import NodeProcess, await_settled, client_of, pool_of
from benchmarks.object_server import ObjectServer, object_server
from benchmarks.processes import Child, client, free_ports
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.tokens import Secret

ADMIN_TOKEN: Final = "chaos may do everything"
CLUSTER_TOKEN: Final = "chaos is one pool"
SEGMENT_BYTES: Final = 2 << 20
TIER_SHARE: Final = 2  # times the memory: nothing leaves it unless a fault wants it so
DISK_MORE_BYTES: Final = 16 << 20
BUCKET_SHARE: Final = 8  # times the disk of a node
BUCKET_OPTIONS: Final = {
    "url": "s3://chaos/pool",
    "region": "us-east-1",
    "anonymous": True,
    "spool_bytes": 32 << 20,
    "flush_s": 0.3,
    "refresh_s": 0.5,
    "read_timeout_s": 0.3,
    "timeout_s": 1.0,
}
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
SHARED: Final = 300  # pages in each of the other zones
OPERATIONS_S: Final = 40.0  # of each thread
MEAN_SLOT_BYTES: Final = (sum(p.SHAPES[0]) * (p.LARGE_EVERY - 1) + sum(p.SHAPES[1])) // p.LARGE_EVERY


class Settings(msgspec.Struct, frozen=True):
    """What a run has beside its plan. `checksum` off shows that the checks can fail."""

    capacity_bytes: int = 128 << 20  # of each node
    lease_s: float = 5.0
    checksum: bool = True


class Line(msgspec.Struct, frozen=True):
    """A kind of worker."""

    name: str
    data_path: str
    checksum: bool
    threads: int
    by_mover: bool = False


LINES: Final = (
    Line("client-shm", "shm", True, 2),
    Line("client-ucx", "ucx", True, 2),
    Line("client-tcp", "tcp", True, 1),
    Line("client-mover", "shm", False, 1, by_mover=True),
    Line("client-shm-bare", "shm", False, 1),  # without checksums: a torn page would be handed out
    Line("client-ucx-bare", "ucx", False, 1),
)


class WorkerProcess(Child):
    """A worker that can be killed and replaced."""

    def __init__(self, config: WorkerConfig, directory: Path) -> None:
        child = client(config, directory, "benchmarks.chaos.worker")
        super().__init__(child.name, child.command, child.log_path)
        self.output = Path(config.output)
        self._directory = directory
        self._config = config
        self._lock = threading.Lock()

    def await_ready(self) -> None:
        """Raises BenchError."""
        self.await_true(Path(self._config.ready).exists, READY_TIMEOUT_S)

    def replace(self) -> None:
        """kill -9, and another in its place, once that is ready. What the killed one had begun to write down
        is cut off. Raises BenchError.
        """
        with self._lock:
            self.kill()
            Path(self._config.ready).unlink(missing_ok=True)
            lines = self.output.read_bytes() if self.output.exists() else b""
            with self.output.open("r+b" if lines else "wb") as file:
                file.truncate(lines.rfind(b"\n") + 1)
            again = {**msgspec.structs.asdict(self._config), "incarnation": self._config.incarnation + 1}
            self._config = WorkerConfig(**again)
            client(self._config, self._directory, "benchmarks.chaos.worker")
            self.spawn()
            self.await_ready()

    @property
    def by_mover(self) -> bool:
        """Whether page movers move its pages."""
        return self._config.by_mover

    def movers_replaced(self) -> int:
        """How many of its page movers failed, and have successors."""
        board = open_rows(self._config.board, COLUMNS)
        return int(board[self._config.writers, MOVERS].sum())

    @contextmanager
    def kept(self) -> Iterator[bool]:
        """Whether nobody pauses or replaces it meanwhile; false where somebody does just now."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

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
    `visitor(name)` makes another node of the pool, not started yet. `disks`: one for each node. `bucket`: of
    all nodes, where the plan has faults of it.
    """

    seed: int
    settings: Settings
    nodes: list[NodeProcess]
    ways: list[Relay]
    workers: list[WorkerProcess]
    output: Path
    visitor: Callable[[str], NodeProcess]
    disks: list[Disk]
    bucket: ObjectServer | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.ring = Ring([NodeAddress(node.name, node.address) for node in self.nodes])

    def note(self, record: Record) -> None:
        """Thread-safe."""
        with self._lock, self.output.open("ab") as file:
            file.write(to_line(record))

    @property
    def shared(self) -> int:
        """Pages in each zone that all write."""
        return SHARED

    def killed(self, node: NodeProcess) -> None:
        """It is about to be: if it died by itself before, that is noted."""
        if node.died:
            self.note(Ended(node.name, False, node.died))

    def owner(self, page: int) -> str:
        """Name of the node that owned the page when the run began."""
        return self.ring.owner(p.key_of(self.seed, page)).node

    def settle(self) -> None:
        """Wait until the nodes are one pool again, unless another fault is at work. Raises BenchError."""
        await_settled(self.nodes)

    def direct(self, **changes: Any) -> PoolClientConfig:
        """A client that reaches every node past the relays, and may make namespaces."""
        own = {"checksum": self.settings.checksum, "token": ADMIN_TOKEN}
        return client_of(self.nodes, **{**own, **TIMEOUTS, **changes})


@contextmanager
def set_up(plan: Plan, settings: Settings, directory: Path) -> Iterator[Field]:
    """Start the nodes and workers in `directory`; whatever happens, none is left. Raises BenchError."""
    seed, minutes, nodes = plan.seed, plan.minutes, plan.nodes
    ports, spools = free_ports(nodes), directory / "spools"
    with ExitStack() as stack:
        with_bucket = any(fault.kind == "bucket" for fault in plan.faults)
        server = stack.enter_context(object_server()) if with_bucket else None
        ways = stack.enter_context(relays([("127.0.0.1", port) for port in ports]))
        addresses = [way.address for way in ways]
        tier_bytes = settings.capacity_bytes * TIER_SHARE
        names = [f"node{index}" for index in range(nodes)]
        disks = {
            name: stack.enter_context(small_disk(directory / "disks" / name, tier_bytes + DISK_MORE_BYTES))
            for name in names
        }

        def own_settings(name: str) -> dict[str, Any]:
            return _with_tiers(disks[name].path / "tier", tier_bytes, spools / name, server)

        node_settings = _node_settings(settings)
        processes = stack.enter_context(
            pool_of(nodes, directory, node_settings, ports, addresses, own_settings)
        )
        refs = [
            PoolNodeRef(node=node.name, address=way.address)
            for node, way in zip(processes, ways, strict=True)
        ]
        workers = make_workers(seed, minutes, settings, refs, directory)
        for worker in workers:
            stack.callback(worker.kill)
            worker.spawn()
        for worker in workers:
            worker.await_ready()
        visitors = _with_tiers(directory / "visitors", tier_bytes, spools, server)
        visitor_settings = {**node_settings, **visitors}
        visitor = partial(_visitor, directory, visitor_settings, addresses)
        output = directory / "faults.jsonl"
        yield Field(
            *(seed, settings, processes, ways, workers, output, visitor, list(disks.values())), bucket=server
        )


def _node_settings(settings: Settings) -> dict[str, Any]:
    """Of every node."""
    return {
        "capacity_bytes": settings.capacity_bytes,
        "slab_bytes": 4 << 20,
        "lease_s": settings.lease_s,
        "reservation_lease_s": settings.lease_s,
        "quarantine_s": settings.lease_s,
        "keep": False,
        "admin_token": ADMIN_TOKEN,
        "cluster": {"token": CLUSTER_TOKEN},
        "namespaces": [{"name": NAMESPACE, "read_token": READ_TOKEN, "write_token": WRITE_TOKEN}],
    }


def _with_tiers(path: Path, capacity_bytes: int, spool: Path, server: ObjectServer | None) -> dict[str, Any]:
    """An SSD, and below it the bucket of all nodes, if there is one."""
    options = {"segment_bytes": SEGMENT_BYTES}
    tier = {"kind": "ssd", "path": path, "capacity_bytes": capacity_bytes, "write": "all", "options": options}
    if server is None:
        return {"tiers": [tier]}
    more = {**options, **BUCKET_OPTIONS, "endpoint": server.endpoint}
    below = {"kind": "object", "path": spool, "capacity_bytes": capacity_bytes * BUCKET_SHARE, "write": "all"}
    return {"tiers": [tier, {**below, "options": more}]}


def _visitor(directory: Path, settings: dict[str, Any], peers: list[str], name: str) -> NodeProcess:
    (port,) = free_ports(1)
    address = f"tcp:127.0.0.1:{port}"
    cluster = {**settings["cluster"], "peers": peers, "advertise": address}

    tiers = [{**tier, "path": tier["path"] / name} for tier in settings["tiers"]]
    own = {"listen": [address], "cluster": cluster, "tiers": tiers}
    return NodeProcess(name, directory, {**settings, **own})


def make_workers(
    seed: int, minutes: float, settings: Settings, nodes: list[PoolNodeRef], directory: Path
) -> list[WorkerProcess]:
    """Not started yet."""
    writers = sum(line.threads for line in LINES)
    board = directory / "board"
    new_rows(board, writers, COLUMNS)
    owned = int(settings.capacity_bytes * len(nodes) * OWNED_SHARE / MEAN_SLOT_BYTES / writers)
    made, first = [], 0
    for line in LINES:
        client = {
            **TIMEOUTS,
            "nodes": [msgspec.structs.asdict(ref) for ref in nodes],
            "data_path": line.data_path,
            "checksum": line.checksum and settings.checksum,
            "restart_wait_s": RESTART_WAIT_S,
            "connections_per_node": 1,
            "token": Secret(WRITE_TOKEN),
        }
        config = WorkerConfig(
            name=line.name,
            seed=seed,
            client=msgspec.convert(client, PoolClientConfig),
            writers=list(range(first, first + line.threads)),
            all_writers=writers,
            owned=owned,
            owned_s=min(OWNED_S, owned / (minutes * 60)),
            shared=SHARED,
            operations_s=OPERATIONS_S,
            damaged=line.checksum,
            by_mover=line.by_mover,
            board=str(board),
            output=str(directory / f"{line.name}.jsonl"),
            ready=str(directory / f"{line.name}.ready"),
        )
        made.append(WorkerProcess(config, directory))
        first += line.threads
    return made


def save(path: Path, content: object) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(content), indent=1) + "\n")
