"""Files in the router's runtime directory: what outlives a process, and what one process tells all others.

The parent makes the directory, which only this user can enter, and removes it at its end. Files are replaced
as a whole, so who reads one never sees half of it.

    NAME.sock       where the process NAME hears its siblings (`carriers`)
    NAME.metrics    its metrics, as they were a moment ago
    ended.metrics   what ended processes have counted; the parent adds them up
    acts            what administrators have done (`ActsFile`)

Acts. A process that is told to let a worker join, leave or drain, or to read the API keys again, does it and
notes it here. The others look here every `REPORT_S` and do the same. A process that starts, also one in place
of a killed one, begins with what it finds here.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.membership import NONE, Order
from pdserve.router.fleet.registry import listed_workers
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Snapshot, add_up, left_behind

logger = logging.getLogger(__name__)

METRICS: Final = ".metrics"
ENDED: Final = "ended"
MAX_FOLDED: Final = 256
"""Names of ended processes that are remembered: far more than may end while somebody adds up."""

LOCK_TRIES: Final = 50
LOCK_PAUSE_S: Final = 0.002
"""The loop stands still meanwhile: 0.1 s at most, if a process was stopped just then."""

_encoder = msgspec.msgpack.Encoder()


class Ended(msgspec.Struct):
    """What processes that have ended have counted."""

    names: list[str] = []
    """Of those whose metrics are in `sum`, the last ones."""
    sum: Snapshot = msgspec.field(default_factory=Snapshot)


class Acts(msgspec.Struct, frozen=True):
    """The file `acts`: what administrators have done."""

    orders: dict[str, Order] = {}
    """By worker id, see `fleet.membership`."""
    keys: int = 0
    """How often the API keys were to be read again."""


_ended = msgspec.msgpack.Decoder(Ended)
_acts = msgspec.msgpack.Decoder(Acts)
_snapshot = msgspec.msgpack.Decoder(Snapshot)


def _replace(path: Path, value: object) -> None:
    """Raises OSError."""
    coming = path.with_name(f".{path.name}.{os.getpid()}")
    coming.write_bytes(_encoder.encode(value))
    coming.replace(path)


def _stamp(path: Path) -> tuple[int, int]:
    """Another one when the file was replaced; (0, 0): there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


class MetricsFiles:
    """The metrics of all of a router's processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ended = directory / f"{ENDED}{METRICS}"

    def write(self, name: str, snapshot: Snapshot) -> None:
        """Raises OSError."""
        _replace(self._directory / f"{name}{METRICS}", snapshot)

    def stamps(self, but: str) -> dict[str, tuple[int, int]]:
        """Of each process that has written, except one."""
        with contextlib.suppress(OSError):
            names = {path.stem for path in self._directory.glob(f"[!.]*{METRICS}")} - {but, ENDED}
            return {name: _stamp(self._directory / f"{name}{METRICS}") for name in names}
        return {}

    def read(self, name: str) -> Snapshot | None:
        """As the process has written them last. None: it has ended."""
        try:
            return _snapshot.decode((self._directory / f"{name}{METRICS}").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def add_up(self, name: str, own: Snapshot, silent: int) -> Snapshot:
        """Those of all processes: `own`, of the process `name`, and what the others have written."""
        others = {other: self.read(other) for other in self.stamps(but=name)}
        ended = self._read_ended()  # after the others: who has ended since is in one of them at least
        found = [one for other, one in others.items() if one is not None and other not in ended.names]
        return add_up([ended.sum, own, *found, Snapshot({"processes_silent": {(): silent}})])

    def refused(self) -> frozenset[str]:
        """Ids of workers that a process refuses: one that starts refuses the same ones."""
        found = (self.read(name) for name in self.stamps(but=""))
        refused = [one.values.get("worker_refused", {}) for one in found if one is not None]
        return frozenset(labels[0] for one in refused for labels, value in one.items() if value)

    def fold(self, name: str) -> None:
        """The process has ended: what it had counted stays. Only the parent calls this. Raises OSError."""
        last = self.read(name)
        if last is not None:
            ended = self._read_ended()
            names = [*ended.names, name][-MAX_FOLDED:]
            _replace(self._ended, Ended(names, add_up([ended.sum, left_behind(last)])))
        for suffix in (METRICS, ".sock"):
            (self._directory / f"{name}{suffix}").unlink(missing_ok=True)

    def _read_ended(self) -> Ended:
        try:
            return _ended.decode(self._ended.read_bytes())
        except FileNotFoundError:
            return Ended()


class ActsFile:
    """What administrators have done, as all of a router's processes know it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "acts"
        self._lock = directory / "acts.lock"
        self._stamp = (0, 0)

    def read(self) -> Acts:
        """Raises OSError."""
        self._stamp = _stamp(self._path)
        try:
            return _acts.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Acts()

    def changed(self) -> Acts | None:
        """As `read`, if something has changed since the last call of either. A file that is gone, with its
        parent, has changed nothing.
        """
        return None if _stamp(self._path) in (self._stamp, (0, 0)) else self.read()

    def change(self, how: Callable[[Acts], Acts]) -> None:
        """Replace what is there; nobody else does meanwhile. Raises OSError."""
        with self._locked():
            _replace(self._path, how(self.read()))

    def order(self, worker: str, order: Order) -> None:
        """An administrator wants this of a worker. Raises OSError."""

        def ordered(acts: Acts) -> Acts:
            others = {id_: one for id_, one in acts.orders.items() if id_ != worker}
            return Acts(others if order == NONE else {**others, worker: order}, acts.keys)

        self.change(ordered)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held for a moment only, and by nobody who has died. Raises OSError."""
        with self._lock.open("w") as lock:
            for left in reversed(range(LOCK_TRIES)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise
                    time.sleep(LOCK_PAUSE_S)
            yield


def ids_of(config: RouterConfig) -> frozenset[str]:
    """Those of the workers that it lists."""
    return frozenset(Worker(role, url).id for url, role in listed_workers(config).items())
