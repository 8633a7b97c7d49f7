"""What the router served, as an anonymous trace: JSON lines in Mooncake's format, which AIPerf
(`mooncake_trace`) and `benchmarks` replay.

    {"timestamp": 1200, "input_length": 1100, "output_length": 40, "hash_ids": [7120…, 913…, 55…],
     "session_id": "8b1f…", "parent_id": "", "answered_hash_ids": [55…]}

`timestamp` is in ms since the trace began. `hash_ids` has one number for each BLOCK_TOKENS tokens of the
prompt. The router does not tokenize, so a block is BLOCK_BYTES bytes of the prompt's JSON, hashed with all
bytes before it, and what is left or missing at the end is cut off or numbered on: prompts that begin alike
have equal first numbers. `answered_hash_ids` are those of the prompt that the session's last answer was
written back for, so a replay knows that they were cached though no prompt had them before.

No text, name or key is in it: numbers and names are keyed hashes (BLAKE2b) by a secret beside the file,
FILE.secret, which is not to be given away with it. It outlives the router and is shared by its processes, so
one file holds what all of them served, restarts included.

The request pays for one append to a bounded queue. A thread hashes and writes what came within BATCH_S at
once, since each time it is woken costs a request more than a line does; what does not fit is dropped and
counted, and a full disk ends the trace, not the router.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from pdserve.errors import ConfigError

BLOCK_TOKENS: Final = 512
"""Mooncake's and AIPerf's."""
BLOCK_BYTES: Final = 2048
QUEUED: Final = 8192
QUEUED_BYTES: Final = 64 << 20
"""Of bodies that wait to be hashed."""
MAX_BYTES: Final = 10**9
"""The trace ends when its file is this large."""
SESSIONS: Final = 10_000
"""Whose last turn is remembered, for `answered_hash_ids`."""
SECRET_BYTES: Final = 32
BATCH_S: Final = 0.02
"""Short, so that the thread holds the interpreter for about a millisecond at 10,000 requests a second."""

_log = logging.getLogger(__name__)


class Served(msgspec.Struct, frozen=True, gc=False):
    """One answered request. `scope`: what else decides its pages, such as the model and the tenant's salt."""

    at_s: float
    """When it came, by `time.time()`."""
    scope: str
    prompt: msgspec.Raw
    """As it stands in the body, which lives as long."""
    body_bytes: int
    input_tokens: int
    output_tokens: int
    session: str = ""
    parent: str = ""


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of the file."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str
    parent_id: str
    answered_hash_ids: list[int]


class Secret(msgspec.Struct, frozen=True):
    """Of one trace: the key of its hashes, and when it began, by `time.time()`."""

    key: bytes
    began_s: float


class Tracer:
    """Makes lines of what was served. Pure; not thread-safe."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._turns: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By session, the first and the last block that its last answer touches."""

    def line(self, served: Served) -> Line:
        ids = block_ids(self._secret.key, served.scope, memoryview(served.prompt), served.input_tokens)
        session = self._name(served.session)
        answered: list[int] = []
        if session:
            first, last = self._turns.pop(session, (0, 0))
            answered = ids[first:last]
            total = served.input_tokens + served.output_tokens
            self._turns[session] = -(-served.input_tokens // BLOCK_TOKENS), total // BLOCK_TOKENS
            if len(self._turns) > SESSIONS:
                self._turns.popitem(last=False)
        return Line(
            timestamp=max(0, round((served.at_s - self._secret.began_s) * 1e3)),
            input_length=served.input_tokens,
            output_length=served.output_tokens,
            hash_ids=ids,
            session_id=session,
            parent_id=self._name(served.parent),
            answered_hash_ids=answered,
        )

    def _name(self, name: str) -> str:
        if not name:
            return ""
        return blake2b(
            name.encode("utf-8", "surrogatepass"), digest_size=12, key=self._secret.key
        ).hexdigest()


def block_ids(key: bytes, scope: str, prompt: bytes | memoryview, tokens: int) -> list[int]:
    """One number below 2^53 for each BLOCK_TOKENS tokens. The last tokens may be fewer: then their number is
    of this many, since whoever replays a trace makes text of one length for each number.
    """
    digest = blake2b(scope.encode("utf-8", "surrogatepass") + b"\0", key=key, digest_size=6)
    ids = []
    for number in range(-(-tokens // BLOCK_TOKENS)):
        # past the end of the text the number of the block keeps its numbers apart
        digest.update(prompt[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] or b"%d" % number)
        if tokens < (number + 1) * BLOCK_TOKENS:
            digest.update(b"\0%d" % (tokens % BLOCK_TOKENS))
        ids.append(int.from_bytes(digest.digest(), "little"))
    return ids


class TraceFile:
    """Writes a trace in a thread of its own. `record` is called from one thread and never waits; who made it
    closes it.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Raises ConfigError where the file or its secret cannot be opened."""
        self._path = path
        self._max_bytes = max_bytes
        self._tracer = Tracer(_secret_of(path))
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"trace.file {path}: {error.strerror}") from error
        self._queue: queue.SimpleQueue[Served | None] = queue.SimpleQueue()
        # Each is written by one thread only, so neither needs a lock.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def record(self, served: Served) -> bool:
        """Have it written, unless it has no tokens. False: it is dropped, since too many wait, or the file is
        full or closed.
        """
        put_bytes = self._put_bytes + served.body_bytes
        if (
            self._queue.qsize() >= QUEUED
            or put_bytes - self._taken_bytes > QUEUED_BYTES
            or not self._thread.is_alive()
        ):
            return False
        self._put_bytes = put_bytes
        self._queue.put(served)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """What waits is written, for at most so long."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            why = None
            while why is None:
                first = self._queue.get()
                if first is not None:
                    time.sleep(BATCH_S)
                why = self._write(first)
            if why:
                _log.warning("%s: the trace ends: %s", self._path, why)
        except OSError as error:
            _log.warning("%s: the trace ends: %s", self._path, error.strerror)
        finally:
            os.close(self._file)

    def _write(self, served: Served | None) -> str | None:
        """Write this and all that waits. Returns why the trace ends, "" where it was closed, None where it
        goes on. Raises OSError.
        """
        lines = bytearray()
        room = self._max_bytes - os.fstat(self._file).st_size
        why = None
        while served is not None:
            self._taken_bytes += served.body_bytes
            if served.input_tokens > 0:
                line = msgspec.json.encode(self._tracer.line(served)) + b"\n"
                if len(lines) + len(line) > room:
                    why = "the file has its full size"
                    break
                lines += line
            try:
                served = self._queue.get_nowait()
            except queue.Empty:
                break
        else:
            why = ""
        if os.write(self._file, lines) < len(lines):
            why = "the disk is full"
        return why


def _secret_of(path: Path) -> Secret:
    """That of the trace, made where there is none. Whoever of several processes comes first makes it. Raises
    ConfigError.
    """
    file = path.with_name(path.name + ".secret")
    made = msgspec.json.encode(Secret(secrets.token_bytes(SECRET_BYTES), time.time()))
    mine = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        with open(mine, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as new:
            new.write(made)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(mine, file)
        finally:
            mine.unlink()
        return msgspec.json.decode(file.read_bytes(), type=Secret)
    except OSError as error:
        raise ConfigError(f"trace.file {path}: its secret {file.name}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"trace.file {path}: {file.name} is no secret of a trace: {error}") from error
