"""A client connection's states and their limits, in memory and in virtual time: in each state of the module's
table, what comes of silence, of drops, of a stop, of an answer's end, and of a client that leaves.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from pdserve.router.http.asgi import Application
from pdserve.router.http.client_connection import (
    CLOSING_S,
    LINGER_S,
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    ClientConnection,
)
from pdserve.router.http.client_request import ClientRequest
from pdserve.router.http.connections import Connections
from tests.support.virtual_time import virtually

KEEP_ALIVE_S, HEAD_S, READ_S = 60, 10.0, 30.0
HOUR_S = 3600.0
HEAD = b"POST /direct HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\n\r\n"
REQUEST = HEAD + b"hello"
ORDINARY = b"GET /ordinary HTTP/1.1\r\nhost: t\r\n\r\n"


class Transport(asyncio.Transport):
    """What the client sees of its connection."""

    def __init__(self, can_write_eof: bool = True) -> None:
        super().__init__()
        self.protocol: ClientConnection
        self.sent = b""
        self.ended_s = self.half_closed_s = None
        self.was_aborted = self.was_lost = self.is_paused = False
        self.unread_bytes = 0
        """Of what was sent, as the test says."""
        self._can_write_eof = can_write_eof

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def write(self, data: Any) -> None:
        assert self.half_closed_s is None
        self.sent += data

    def can_write_eof(self) -> bool:
        return self._can_write_eof

    def write_eof(self) -> None:
        self.half_closed_s = self.protocol.loop.time()

    def is_closing(self) -> bool:
        return self.ended_s is not None

    def close(self) -> None:
        if self.ended_s is None:
            self.ended_s = self.protocol.loop.time()
        if not self.was_lost and (self.was_aborted or not self.unread_bytes):
            self.was_lost = True
            self.protocol.loop.call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.was_aborted = True
        self.close()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Held(ClientRequest):
    """A request that the test answers."""

    def __init__(self, begun: list[Held], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun = begun
        self.gone = 0

    def begin(self) -> None:
        self.begun.append(self)

    def on_gone(self) -> None:
        self.gone += 1


class Client:
    """A connection, its handler, and its time since it was made."""

    def __init__(self, can_write_eof: bool = True, state: Connections | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.begun_s = loop.time()
        self.loop = loop
        self.cycles: list[Held] = []
        self.targets, self.find, self.running = {b"/direct": "/direct"}, {"/direct": "/direct"}.get, ()
        self.state = state or Connections(
            Application(self.ordinary),
            self,
            keep_alive_s=KEEP_ALIVE_S,
            head_s=HEAD_S,
            client_read_s=READ_S,
        )
        self.connection = ClientConnection(self.state, loop)
        self.transport = self.connection.transport = Transport(can_write_eof)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    def request(self, *arguments: Any) -> Held:
        return Held(self.cycles, *arguments)

    async def ordinary(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(self, data: bytes) -> None:
        self.connection.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def answer(self, number: int = -1) -> None:
        self.cycles[number].start(200, b"", 2)
        await self.cycles[number].write(b"ok", more=False)
        await self.settle()

    async def stop(self) -> None:
        """As the server does it."""
        self.state.is_stopping = True
        self.connection.shutdown()
        await self.settle()

    def after_s(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - self.begun_s, 1)

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", self.transport.sent)]


async def in_state(state: str, *, can_write_eof: bool = True) -> Client:
    client = Client(can_write_eof)
    if state == "head":
        await client.send(HEAD[:9])
    elif state == "idle again":
        await client.send(REQUEST)
        await client.answer()
    elif state == "head again":
        await client.send(REQUEST + HEAD[:9])
        await client.answer()
    elif state == "answering":
        await client.send(REQUEST)
    elif state == "answering, head":
        await client.send(REQUEST + HEAD[:9])
    elif state == "answering, body":
        await client.send(HEAD + b"hel")
    elif state == "rest":
        await client.send(HEAD + b"hel")
        await client.answer()
    return client


STATES = [
    "idle",
    "idle again",
    "head",
    "head again",
    "answering",
    "answering, head",
    "answering, body",
    "rest",
]


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("state", "ended_s", "half_closed_s", "statuses"),
    [
        ("idle", KEEP_ALIVE_S, None, []),
        ("idle again", KEEP_ALIVE_S, None, [200]),
        ("head", HEAD_S + CLOSING_S, HEAD_S, [408]),
        ("head again", HEAD_S + CLOSING_S, HEAD_S, [200, 408]),
        ("answering", None, None, []),
        ("answering, head", None, None, []),
        ("answering, body", None, None, []),
        ("rest", HEAD_S + CLOSING_S, HEAD_S, [200]),
    ],
)
@virtually
async def test_each_state_ends_when_its_limit_is_exceeded_and_drops_do_not_extend_it(
    state: str, ended_s: float | None, half_closed_s: float | None, statuses: list[int], drops: bool
) -> None:
    client = await in_state(state)
    if drops and state in ("head", "head again"):
        for byte in HEAD[9:20]:
            await asyncio.sleep(1.0)
            await client.send(bytes([byte]))
    elif drops and state == "rest":
        await asyncio.sleep(9.0)
        await client.send(b"l")
    await asyncio.sleep(HOUR_S)
    transport = client.transport
    assert client.after_s(transport.ended_s) == ended_s
    assert client.after_s(transport.half_closed_s) == half_closed_s
    assert client.statuses == statuses
    assert transport.was_aborted == (half_closed_s is not None)  # this client never closes


@pytest.mark.parametrize("state", STATES)
@virtually
async def test_a_server_that_stops_answers_what_comes_within_the_lingering_time_and_closes(
    state: str,
) -> None:
    client = await in_state(state)
    await client.stop()
    await asyncio.sleep(LINGER_S / 2)
    if state.startswith("head"):
        await client.send(HEAD[9:] + b"hello")
    elif state.startswith("idle"):
        await client.send(REQUEST)
    elif state == "rest":
        await client.send(b"lo" + REQUEST)
    if state == "answering, body":
        await client.send(b"lo")
    assert not client.transport.is_closing()
    await client.answer()
    assert set(client.statuses) == {200}
    assert client.transport.sent.endswith(b"connection: close\r\n\r\nok")
    assert client.transport.is_closing()


@pytest.mark.parametrize("state", ["idle", "idle again", "head", "rest"])
@virtually
async def test_a_server_that_stops_waits_no_longer_than_the_lingering_time(state: str) -> None:
    client = await in_state(state)
    await client.stop()
    await asyncio.sleep(HOUR_S)
    assert client.after_s(client.transport.half_closed_s or client.transport.ended_s) == LINGER_S
    assert (408 in client.statuses) == (state == "head")


@virtually
async def test_an_answer_that_promised_to_keep_alive_is_kept_for_the_lingering_time() -> None:
    client = await in_state("answering")
    client.cycles[0].start(200, b"", 2)
    await client.stop()
    await asyncio.sleep(5)
    await client.cycles[0].write(b"ok", more=False)
    assert not client.transport.is_closing()
    await asyncio.sleep(HOUR_S)
    assert client.after_s(client.transport.ended_s) == 5 + LINGER_S
    assert b"connection: close" not in client.transport.sent


@virtually
async def test_a_connection_accepted_by_a_server_that_stops_is_closed_soon() -> None:
    client = Client()
    client.state.is_stopping = True
    client.connection.connection_made(client.transport)
    await asyncio.sleep(HOUR_S)
    assert client.after_s(client.transport.ended_s) == LINGER_S


@pytest.mark.parametrize("state", STATES)
@virtually
async def test_a_client_that_leaves_is_seen_and_nothing_is_left_behind(state: str) -> None:
    client = await in_state(state)
    client.transport.close()
    await client.settle()
    assert [cycle.gone for cycle in client.cycles] == [not cycle.is_complete for cycle in client.cycles]
    assert client.connection.is_closing
    assert all(cycle.is_gone or cycle.is_complete for cycle in client.cycles)
    assert client.connection not in client.state.connections
    loop: Any = client.loop
    assert [t for t in loop._scheduled if not t.cancelled() and "_on_timer" in repr(t)] == []


@virtually
async def test_the_rest_of_a_request_that_was_answered_makes_the_connection_idle() -> None:
    client = await in_state("rest")
    await asyncio.sleep(5.0)
    await client.send(b"lo")
    await asyncio.sleep(HOUR_S)
    assert client.after_s(client.transport.ended_s) == 5 + KEEP_ALIVE_S


@pytest.mark.parametrize("again", [False, True])
@virtually
async def test_a_head_without_end_is_answered_once(again: bool) -> None:
    client = await in_state("idle again" if again else "idle")
    await client.send(HEAD[:9] + b"x" * (MAX_HEAD_BYTES - 9))
    assert 431 not in client.statuses
    for _ in range(9):
        await client.send(b"x" * 1000)
    assert client.statuses == [200, 431] if again else [431]
    assert client.transport.half_closed_s is not None


@pytest.mark.parametrize("in_one", [True, False])
@virtually
async def test_a_head_of_very_many_lines_is_answered_and_not_kept(in_one: bool) -> None:
    """Ten thousand headers of four letters are within the bytes, and took 2 MB."""
    client = await in_state("idle")
    lines = b"x: y\r\n" * (MAX_HEADERS + 1)
    if in_one:
        await client.send(HEAD.removesuffix(b"\r\n") + lines + b"\r\n")
    else:
        await client.send(HEAD.removesuffix(b"\r\n"))
        await client.send(lines)
    assert client.statuses == [431]
    assert client.transport.half_closed_s is not None
    await client.send(b"rest")
    assert client.statuses == [431]


@virtually
async def test_a_head_without_end_during_an_answer_ends_the_connection() -> None:
    client = await in_state("answering, head")
    await client.send(b"x" * (MAX_HEAD_BYTES + 1))
    assert client.transport.is_closing()
    assert client.statuses == []


@virtually
async def test_over_tls_a_connection_closes_without_a_half_closed_state() -> None:
    client = await in_state("head", can_write_eof=False)
    await asyncio.sleep(HOUR_S)
    assert client.statuses == [408]
    assert client.after_s(client.transport.ended_s) == HEAD_S


@virtually
async def test_many_large_requests_do_not_count_as_one_head() -> None:
    client = Client()
    for _ in range(5):
        body = b"y" * 60_000
        await client.send(HEAD.replace(b" 5", b" 60000") + body[:50_000])
        await client.send(body[50_000:] + HEAD[:9])
        await client.send(HEAD[9:] + b"hello")
        await client.answer(-1)
        await client.answer(-1)
    assert client.statuses == [200] * 10


@pytest.mark.parametrize("size", [5, 20_000])
@virtually
async def test_pipelined_requests_are_read_within_bounds_and_answered_in_order(size: int) -> None:
    client = Client()
    sent = 0
    while not client.transport.is_paused and sent < 100:
        await client.send(HEAD.replace(b" 5", b" %d" % size) + b"z" * size)
        sent += 1
    assert sent - 1 <= MAX_AHEAD + 1
    assert (sent - 2) * size <= MAX_AHEAD_BYTES
    for number in range(sent):
        assert len(client.cycles) == number + 1
        await client.answer()
    assert not client.transport.is_paused
    assert client.statuses == [200] * sent


@pytest.mark.parametrize("request_", [ORDINARY, REQUEST])
@virtually
async def test_who_sends_thousands_of_requests_at_once_is_closed_and_takes_a_bounded_memory(
    request_: bytes,
) -> None:
    """40 strangers made a router five times as large."""
    client = Client()
    await client.send(request_ * 5000)
    assert client.transport.ended_s is not None
    assert len(client.connection._pipeline) <= MAX_PIPELINED
    assert len(client.cycles) <= 1, "what waits is not served"


@virtually
async def test_beyond_the_bound_the_oldest_connection_goes_that_waits_for_no_answer() -> None:
    """A stranger who opened as many sockets as the router may have kept all clients out."""
    busy = Client()
    await busy.send(REQUEST)
    busy.state.connection_limit.most = 3
    idle = [Client(state=busy.state) for _ in range(4)]
    assert [client.transport.was_aborted for client in idle] == [True, True, False, False]
    await busy.answer()
    assert busy.statuses == [200]
    Client(state=busy.state)
    assert busy.transport.was_aborted, "it waits for no answer any more, and is the oldest"


@virtually
async def test_ordinary_and_direct_requests_take_their_turns() -> None:
    client = Client()
    await client.send(REQUEST + ORDINARY + REQUEST)
    assert client.statuses == []
    await client.answer()
    assert client.statuses == [200, 200]
    await client.answer()
    assert client.statuses == [200, 200, 200]


@pytest.mark.parametrize(
    "data",
    [
        b"GET /direct HTTP/1.1\r\nhost: t\r\n\r\n",
        b"POST /direct?q HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n",
        b"POST http://t/%64irect HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n",
        b"POST /direct HTTP/1.0\r\ncontent-length: 0\r\n\r\n",
        b"POST /direct HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: x\r\ncontent-length: 0\r\n\r\n",
    ],
)
@virtually
async def test_what_is_meant_for_the_direct_handler_gets_there_however_it_is_written(data: bytes) -> None:
    client = Client()
    await client.send(data)
    [cycle] = client.cycles
    assert (cycle.path, cycle.version) == ("/direct", "1.0" if b"1.0" in data else "1.1")
    assert client.statuses == []


@virtually
async def test_after_an_ordinary_request_a_connection_is_idle() -> None:
    client = Client()
    await asyncio.sleep(KEEP_ALIVE_S / 2)
    await client.send(ORDINARY)
    await asyncio.sleep(HOUR_S)
    assert client.statuses == [200]
    assert client.after_s(client.transport.ended_s) == 1.5 * KEEP_ALIVE_S


@virtually
async def test_what_is_no_http_behind_a_request_does_not_get_into_its_answer() -> None:
    client = await in_state("answering")
    client.cycles[0].start(200, b"", 10)
    await client.cycles[0].write(b"half", more=True)
    await client.send(b"SSH-2.0-x\r\n\r\n")
    assert client.transport.is_closing()
    assert client.transport.sent.endswith(b"half")


@virtually
async def test_a_client_that_takes_nothing_of_its_answer_is_cut_off() -> None:
    client = await in_state("answering")
    client.transport.unread_bytes = 100_000
    client.connection.pause_writing()
    for taken in (60_000, 0):  # it is slow at first
        await asyncio.sleep(READ_S - 1.0)
        client.transport.unread_bytes -= taken
    assert not client.transport.was_aborted
    await asyncio.sleep(2 * READ_S)
    assert client.transport.was_aborted
    assert client.connection.is_closing


@virtually
async def test_a_client_that_reads_again_in_time_is_not_cut_off() -> None:
    client = await in_state("answering")
    for _ in range(10):
        client.transport.unread_bytes = 100_000
        client.connection.pause_writing()
        await asyncio.sleep(READ_S - 1.0)
        client.transport.unread_bytes = 0
        client.connection.resume_writing()
    await asyncio.sleep(HOUR_S)
    assert not client.transport.was_aborted


@pytest.mark.parametrize("closes", [False, True])
@virtually
async def test_the_end_of_an_answer_that_a_client_does_not_take_is_not_kept_for_ever(closes: bool) -> None:
    client = await in_state("answering")
    client.transport.unread_bytes = 1000  # too little to pause the writing
    client.cycles[-1].start(200, b"", 2, closes=closes)
    await client.cycles[-1].write(b"ok", more=False)
    await asyncio.sleep(KEEP_ALIVE_S + READ_S + 1.0)
    assert client.transport.was_aborted
    assert client.transport.was_lost


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
"""What Java's client says on each new connection."""


@pytest.mark.parametrize("step", [1, 50, 10_000])
@virtually
async def test_an_offer_of_another_protocol_is_passed_over_and_the_connection_kept(step: int) -> None:
    client = Client()
    offering = HEAD.removesuffix(b"\r\n") + OFFER + b"\r\nhello"
    data = offering + ORDINARY.removesuffix(b"\r\n") + OFFER + b"\r\n" + offering
    for at in range(0, len(data), step):
        await client.send(data[at : at + step])
    for _ in range(2):
        [*_, cycle] = client.cycles
        assert cycle.body == b"hello"
        names = [name for name, _ in cycle.headers]
        assert names == [b"host", b"content-length"]
        await client.answer()
    assert client.statuses == [200, 200, 200]
    assert b"connection: close" not in client.transport.sent
    assert not client.transport.is_closing()


@virtually
async def test_what_else_the_client_says_of_its_connection_counts_beside_an_offer() -> None:
    client = Client()
    await client.send(HEAD.removesuffix(b"\r\n") + b"connection: upgrade, close\r\nupgrade: h2c\r\n\r\nhello")
    await client.answer()
    assert b"connection: close" in client.transport.sent
    assert client.transport.is_closing()
