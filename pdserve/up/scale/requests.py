"""`pdserve scale` asks, the supervisor answers: two small files in the run directory.

The run directory is the user's own and can be read from wherever the user works: on this host, or on a login
node of Slurm. So a request needs no port, no key, and no place of its own.

- The command writes `scale.json`, whole, by a rename. A lock lets only one command ask at a time.
- The supervisor looks every `POLL_S`. It answers in `scaled.json`: that it has taken the request, then how it
  ended. One that it took before, or that lay there when it started, is not taken.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import StartupError
from pdserve.up.claims import SUPERVISOR_LOCK
from pdserve.up.config import MAX_COUNT, WorkerRole
from pdserve.up.places.process import write_private

POLL_S: Final = 0.5
REQUEST: Final = "scale.json"
ANSWER: Final = "scaled.json"
LOCK: Final = "scale.lock"

State = Literal["taken", "done", "failed"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Wanted numbers of workers."""

    id: str
    counts: dict[WorkerRole, Annotated[int, Meta(ge=0, le=MAX_COUNT)]]


class Answer(msgspec.Struct, frozen=True):
    """To the request of this id."""

    id: str
    state: State
    text: str = ""
    """What is wrong, where it failed."""


class Mailbox:
    """The supervisor's side."""

    def __init__(self, run_dir: Path) -> None:
        """What lies there is of an earlier supervisor. Raises StartupError."""
        self._run_dir = run_dir
        self._taken = ""
        self._is_owed = False
        try:
            for name in (REQUEST, ANSWER):
                (run_dir / name).unlink(missing_ok=True)
        except OSError as error:
            raise StartupError(f"{run_dir}: cannot be written: {error.strerror}") from None

    def take(self) -> Request | None:
        """A new request; None: there is none, or one that nobody can read, which is answered."""
        try:
            request = msgspec.json.decode((self._run_dir / REQUEST).read_bytes(), type=Request)
        except (OSError, msgspec.DecodeError):
            return None
        if request.id == self._taken:
            return None
        self._taken = request.id
        self.answer("taken")
        return request

    def answer(self, state: State, text: str = "") -> None:
        """To the request that was taken last. Where it cannot be written, the command's deadline ends its
        wait.
        """
        self._is_owed = state == "taken"
        with suppress(StartupError):
            _write(self._run_dir / ANSWER, Answer(self._taken, state, text))

    def close(self) -> None:
        """Nobody waits for an answer that does not come any more."""
        if self._is_owed:
            self.answer("failed", "the cluster has stopped")


def write_request(run_dir: Path, request: Request) -> None:
    """Ask. Raises StartupError."""
    _write(run_dir / REQUEST, request)


def withdraw(run_dir: Path) -> None:
    """Take back a request that nobody took. One that is being taken now may be carried out all the same."""
    (run_dir / REQUEST).unlink(missing_ok=True)


def read_answer(run_dir: Path, id_: str) -> Answer | None:
    """The newest answer to this request, if there is one."""
    try:
        answer = msgspec.json.decode((run_dir / ANSWER).read_bytes(), type=Answer)
    except (OSError, msgspec.DecodeError):
        return None
    return answer if answer.id == id_ else None


@contextmanager
def asking(run_dir: Path) -> Iterator[None]:
    """Be the only one that asks. Raises StartupError: another does, or no cluster runs from here."""
    try:
        owner = (run_dir / SUPERVISOR_LOCK).read_text(encoding="utf-8").strip()
        lock = (run_dir / LOCK).open("a")
    except OSError as error:
        raise StartupError(f"{run_dir}: no cluster runs from here: {error.strerror}") from None
    with lock:
        if not owner:
            raise StartupError(f"{run_dir}: the cluster that ran from here has stopped")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"{run_dir}: another `pdserve scale` is under way: wait for it") from None
        yield


def _write(path: Path, content: Request | Answer) -> None:
    write_private(path, msgspec.json.encode(content).decode())
