"""Files in the router's runtime directory: what outlives a process, and what one process tells all others.

The parent makes the directory, which only this user can enter, and removes it at its end. Files are replaced
as a whole, so who reads one never sees half of it.

    NAME.sock       where the process NAME hears its siblings (`carriers`)
    NAME.metrics    its metrics, as they were a moment ago
    ended.metrics   what ended processes have counted; the parent adds them up
    acts            what administrators have done (`Acts`)

Acts. A process that is told to let a worker join, leave or drain, or to read the API keys again, does it and
notes it here, one at a time. The others look here every `REPORT_S` and do the same. A process that starts,
also one in place of a killed one, begins with the changes that lead to the present fleet (`fleet.changes`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.changes import Changes, FleetChange
from pdserve.router.fleet.registry import listed_workers
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Snapshot, add_up, left_behind

logger = logging.getLogger(__name__)

METRICS: Final = ".metrics"
ENDED: Final = "ended"
MAX_FOLDED: Final = 256
"""Names of ended processes that are remembered: far more than may end while somebody adds up."""
MAX_RECENT: Final = 256
"""Acts that are kept for processes that have yet to do them: those of `REPORT_S`, and more."""

LOCK_TRIES: Final = 50
LOCK_PAUSE_S: Final = 0.002
"""The loop stands still meanwhile: 0.1 s at most, if a process was stopped just then."""

_encoder = msgspec.msgpack.Encoder()


class Ended(msgspec.Struct):
    """What processes that have ended have counted."""

    names: list[str] = []
    """Of those whose metrics are in `sum`, the last ones."""
    sum: Snapshot = msgspec.field(default_factory=Snapshot)


class Numbered(msgspec.Struct):
    """An act; numbers grow by one."""

    number: int
    change: FleetChange | None
    """None: the API keys are to be read again."""


class Noted(msgspec.Struct):
    """The file `acts`."""

    number: int = 0
    """Of the last act."""
    recent: list[Numbered] = []
    changes: list[FleetChange] = []
    """From the configured fleet to the present one."""


_ended = msgspec.msgpack.Decoder(Ended)
_noted = msgspec.msgpack.Decoder(Noted)
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


class Acts:
    """What administrators have done, in all of a router's processes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "acts"
        self._lock = directory / "acts.lock"
        self._stamp = (0, 0)
        self._done = 0
        """Number of the last act that was done here."""

    def begin(self, listed_before: Collection[str] | None, config: RouterConfig) -> tuple[FleetChange, ...]:
        """The changes that a process that starts has to make. `listed_before`: ids of the workers that the
        configuration listed before it was read again, if it was.
        """
        self._stamp = _stamp(self._path)
        noted = self._read()
        self._done = noted.number
        changes = Changes(noted.changes)
        return tuple(changes if listed_before is None else changes.configured(listed_before, ids_of(config)))

    def note(self, change: FleetChange | None) -> None:
        """This process has done it. Raises OSError."""
        with self._locked():
            noted = self._read()
            changes = Changes(noted.changes)
            if change is not None:
                changes.note(change)
                if change.act == "gone" and list(changes) == noted.changes:
                    return
            number = noted.number + 1
            recent = [*noted.recent, Numbered(number, change)][-MAX_RECENT:]
            _replace(self._path, Noted(number, recent, list(changes)))
            if self._done == noted.number:  # else this one is done again, after what others have done before
                self._done = number

    def new(self) -> list[FleetChange | None]:
        """What is to be done here since the last call, in order. Cheap if it is nothing. Raises OSError."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return []
        noted = self._read()
        found = [one.change for one in noted.recent if one.number > self._done]
        self._stamp, self._done = stamp, noted.number
        return found

    def configured(self, listed_before: Collection[str], config: RouterConfig) -> None:
        """The configuration was read again, and all processes have it. Raises OSError."""
        with self._locked():
            noted = self._read()
            changes = Changes(noted.changes).configured(listed_before, ids_of(config))
            _replace(self._path, Noted(noted.number, noted.recent, list(changes)))

    def _read(self) -> Noted:
        try:
            return _noted.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Noted()

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
