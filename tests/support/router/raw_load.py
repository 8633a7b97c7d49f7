"""Load for a router, or for a worker itself: so many connections, each with one request after another.

Closed loop: a connection sends its next request when the answer is whole. Requests differ in their prompts,
which come from the seed. Counted is what happens in the window after `warm_up_s`; what then still runs is
waited for. Connections with a pace should begin one after the other (`ramp_s`), so that their chunks do not
come all at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import httptools
import msgspec

from tests.support.processes import HarnessError, accepts, free_ports, server
from tests.support.router.fast_worker import MODEL

PATH: Final = "/v1/chat/completions"
CONNECT_TIMEOUT_S: Final = 30.0
FINISH_TIMEOUT_S: Final = 30.0
BODIES: Final = 64
OWN_BYTES: Final = 64
"""Of a prompt that differ from those of the others. A longer prompt repeats them."""
_STAMP: Final = re.compile(rb'"T(\d{20});')
_STAMP_BYTES: Final = 23

T = TypeVar("T")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` connections. `chunks` of each answer, `interval_us` apart; 0 chunks: answers in one piece."""

    streams: int
    seconds: float
    chunks: int = 0
    interval_us: int = 0
    ramp_s: float = 0.0
    """The connections' first requests are spread over this long."""
    warm_up_s: float = 0.2
    prompt_bytes: int = 32
    messages: int = 1
    """That have the prompt together."""
    key: str = ""
    """An API key. Where there is one, each request also names its session."""
    seed: int = 1


class Loaded(msgspec.Struct, kw_only=True):
    """What was counted."""

    first_ms: array[float]
    """From a request to the first byte of its answer's body, or to its first chunk."""
    chunk_ms: array[float]
    """From a worker's sending a chunk to its being here."""
    seconds: float = 0.0
    requests: int = 0
    errors: int = 0
    first_error: str = ""


def make_requests(load: Load, port: int) -> list[bytes]:
    """Whole HTTP requests that the connections take turns with; the same for the same seed."""
    draw = random.Random(f"router {load.seed}")
    requests = []
    size = load.prompt_bytes // load.messages
    for number in range(BODIES):
        own = "".join(draw.choices(string.ascii_lowercase, k=min(size, OWN_BYTES)))
        prompt = (own * (size // OWN_BYTES + 1))[:size]
        said = [{"role": ("user", "assistant")[n % 2], "content": prompt} for n in range(load.messages)]
        asked = {"model": MODEL, "messages": said, "max_tokens": 1}
        if load.chunks:
            asked |= {"stream": True, "max_tokens": load.chunks, "seed": load.interval_us}
        body = json.dumps(asked).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        if load.key:
            head += f"authorization: Bearer {load.key}\r\nx-session-id: session-{number}\r\n"
        requests.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return requests


class Mock(NamedTuple):
    """Mock workers that run, all in one process."""

    ports: list[int]
    pid: int


@contextmanager
def mock_workers(role: str, directory: Path, count: int = 1) -> Iterator[Mock]:
    """Workers that compute nothing and answer at once, in a process of their own. Raises HarnessError."""
    ports = free_ports(count)
    command = [sys.executable, "-m", "tests.support.router.fast_worker", role, *map(str, ports)]
    log = directory / f"{role}.log"
    with server(f"the mock {role} workers", command, log, lambda: all(map(accepts, ports))) as made:
        yield Mock(ports, made.pid)


async def run_load(load: Load, port: int, look: Callable[[], T]) -> tuple[Loaded, T, T]:
    """Put the load on whoever listens on `port`. `look` is called at the beginning and at the end of the
    window. Raises HarnessError when no connection can be had.
    """
    run = _Run(load, port)
    loop = asyncio.get_running_loop()
    clients = [_Client(run) for _ in range(load.streams)]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for client in clients:
                await loop.create_connection(partial(_itself, client), "127.0.0.1", port)
        for number, client in enumerate(clients):
            loop.call_later(number / load.streams * load.ramp_s, client.send)
        await asyncio.sleep(load.ramp_s + load.warm_up_s)
        before, began_s = look(), time.monotonic()
        run.counts = True
        await asyncio.sleep(load.seconds)
        run.counts = run.goes_on = False
        run.done.seconds = time.monotonic() - began_s
        after = look()
        finish_s = time.monotonic() + FINISH_TIMEOUT_S
        while any(client.is_busy for client in clients) and time.monotonic() < finish_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return run.done, before, after
    except (OSError, TimeoutError) as error:
        raise HarnessError(f"no connection to port {port}: {error}") from error
    finally:
        for client in clients:
            client.close()


def _itself(client: _Client) -> _Client:
    return client


class _Run:
    """What the connections of one load share."""

    def __init__(self, load: Load, port: int) -> None:
        self.load = load
        self.done = Loaded(first_ms=array("d"), chunk_ms=array("d"))
        self.counts = False
        self.goes_on = True
        self._requests = make_requests(load, port)
        self._sent = 0

    def next_request(self) -> bytes:
        self._sent += 1
        return self._requests[self._sent % BODIES]

    def failed(self, why: str) -> None:
        self.done.errors += 1
        self.done.first_error = self.done.first_error or why


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sent_s = 0.0
        self._counts_first = False
        self._chunks = 0
        self._carry = b""
        self.is_busy = False

    def send(self) -> None:
        """The next request."""
        self._counts_first = self._run.counts
        self._sent_s = time.monotonic()
        assert self._transport is not None
        self.is_busy = True
        self._transport.write(self._run.next_request())

    def close(self) -> None:
        """At once; an answer that is under way has failed."""
        if self.is_busy:
            self._fail("an answer did not come to its end")
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, why: str) -> None:
        self.is_busy = False
        self._run.failed(why)

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_busy:
            self._fail(f"a connection was closed: {error or 'by the other end'}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"an answer is not HTTP: {error}")
            self.close()

    # --- httptools

    def on_message_begin(self) -> None:
        self._chunks, self._carry = 0, b""

    def on_body(self, body: bytes) -> None:
        run, now_ns = self._run, time.monotonic_ns()
        if not run.load.chunks:
            self._note_first(now_ns)
            return
        data = self._carry + body
        end = 0
        for stamp in _STAMP.finditer(data):
            if not self._chunks:
                self._note_first(now_ns)
            self._chunks += 1
            end = stamp.end()
            if run.counts:
                run.done.chunk_ms.append((now_ns - int(stamp[1])) / 1e6)
        self._carry = data[max(end, len(data) - _STAMP_BYTES) :]

    def on_message_complete(self) -> None:
        run, status = self._run, self._parser.get_status_code()
        self.is_busy = False
        if status != 200 or self._chunks != run.load.chunks:
            run.failed(f"status {status}, {self._chunks} of {run.load.chunks} chunks")
        elif run.counts:
            run.done.requests += 1
        if run.goes_on:
            self.send()

    def _note_first(self, now_ns: int) -> None:
        if self._counts_first:
            self._counts_first = False
            self._run.done.first_ms.append(now_ns / 1e6 - self._sent_s * 1e3)
