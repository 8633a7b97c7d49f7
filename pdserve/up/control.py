"""The control socket of a running cluster, through which `pdserve up scale`, `restart` and `status` ask.

It is `control.sock` in the run directory, which only its user can enter. A client sends a `Request` as one
line of JSON, and gets one `Answer` as a line once what it wants is so. A client that goes away changes
nothing: the cluster goes on with what it was asked.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import StartupError
from pdserve.up.config import MAX_COUNT, WorkerRole
from pdserve.up.events import ProcessStatus

SOCKET: Final = "control.sock"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wanted."""

    command: Literal["scale", "restart", "status"]
    counts: dict[WorkerRole, Annotated[int, Meta(ge=0, le=MAX_COUNT)]] = {}
    """Of `scale`: numbers of workers."""


class Answer(msgspec.Struct, frozen=True):
    """To a request. `problem`: why it is not so; empty: it is."""

    problem: str = ""
    processes: tuple[ProcessStatus, ...] = ()


@asynccontextmanager
async def served(run_dir: Path, answer: Callable[[Request], Awaitable[Answer]]) -> AsyncIterator[None]:
    """Answer requests until the block ends. Raises StartupError: the socket cannot be made."""
    clients: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        clients.add(task)
        task.add_done_callback(clients.discard)
        try:
            line = await reader.readline()
            try:
                answered = await answer(msgspec.json.decode(line, type=Request))
            except msgspec.DecodeError as error:
                answered = Answer(problem=f"not a request: {error}")
            writer.write(msgspec.json.encode(answered) + b"\n")
            await writer.drain()
        except (OSError, ValueError):  # it went away, or its line has no end
            pass
        finally:
            writer.close()

    with _short(run_dir) as path:
        try:
            server = await asyncio.start_unix_server(serve, str(path))
        except OSError as error:
            raise StartupError(f"{run_dir / SOCKET}: cannot be made: {error.strerror}") from None
        try:
            yield
        finally:
            server.close()
            with suppress(TimeoutError):  # answers that are due now
                await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 1.0)
            path.unlink(missing_ok=True)


def ask(run_dir: Path, request: Request, timeout_s: float) -> Answer:
    """The answer of the cluster that runs from here; blocks. Raises StartupError: there is none, or it did
    not come in time.
    """
    with _short(run_dir) as path, socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            raise StartupError(f"{run_dir}: no cluster runs from here") from None
        connection.settimeout(timeout_s)
        connection.sendall(msgspec.json.encode(request) + b"\n")
        line = b""
        try:
            while not line.endswith(b"\n") and (data := connection.recv(1 << 16)):
                line += data
        except TimeoutError:
            raise StartupError(f"not done within {timeout_s:.0f} s; the cluster goes on with it") from None
        except OSError:
            line = b""
    if not line:
        raise StartupError("the cluster has stopped")
    return msgspec.json.decode(line, type=Answer)


@contextmanager
def _short(run_dir: Path) -> Iterator[Path]:
    """The socket's path, of a few bytes however long the run directory's is: an address has room for 107."""
    try:
        directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise StartupError(f"{run_dir}: no cluster runs from here: {error.strerror}") from None
    try:
        yield Path(f"/proc/self/fd/{directory}") / SOCKET
    finally:
        os.close(directory)
