"""An ASGI application behind the server's connections gets what a client sent, and its answer arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.router.config.router import RouterConfig
from pdserve.router.http.serving import make_server
from tests.support.router.harness import Connection, served


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[Connection]:
    async with served(make_server(app, RouterConfig())) as port:
        client = Connection(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            client.leave()


def answering(status: int, *pieces: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    return app


async def test_an_application_sees_the_request_as_it_was_sent() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        seen["body"] = b""
        while True:
            message = await receive()
            seen["body"] += message["body"]
            if not message["more_body"]:
                break
        await answering(204)(scope, receive, send)

    async with client_of(app) as client:
        await client.send("/a%20b/c?d=%20", b"x" * 100_000, {"X-Name": "v"}, method="PUT")
        assert (await client.head()).status == 204
    assert (seen["method"], seen["path"], seen["query_string"]) == ("PUT", "/a b/c", b"d=%20")
    assert seen["raw_path"] == b"/a%20b/c"
    assert (b"x-name", b"v") in seen["headers"]
    assert (seen["http_version"], seen["scheme"]) == ("1.1", "http")
    assert seen["client"][0] == seen["server"][0] == "127.0.0.1"
    assert seen["body"] == b"x" * 100_000


async def test_an_answer_without_a_length_comes_in_chunks() -> None:
    async with client_of(answering(200, b"one", b"two")) as client:
        for _ in range(2):  # the connection is kept
            await client.send("/", b"", method="GET")
            answer = await client.response()
            assert (answer.body, answer.headers["transfer-encoding"]) == (b"onetwo", "chunked")


@pytest.mark.parametrize(
    ("method", "status", "length"), [("HEAD", 200, "3"), ("GET", 204, None), ("GET", 304, None)]
)
async def test_an_answer_that_has_no_body_ends_with_its_head(
    method: str, status: int, length: str | None
) -> None:
    headers = ((b"content-length", length.encode()),) if length else ()
    async with client_of(answering(status, *([b"abc"] if length else []), headers=headers)) as client:
        for _ in range(2):  # nothing of the first answer stands before the second
            await client.send("/", b"", method=method)
            answer = await client.head()
            assert (answer.status, answer.headers.get("content-length")) == (status, length)
            assert "transfer-encoding" not in answer.headers


async def test_a_stream_to_an_old_client_ends_with_the_connection() -> None:
    async with client_of(answering(200, b"one", b"two")) as client:
        client.writer.write(b"GET / HTTP/1.0\r\n\r\n")
        answer = await client.head()
        assert "transfer-encoding" not in answer.headers
        assert await client.reader.read() == b"onetwo"


async def test_an_application_that_fails_is_answered_500_or_cut_off(caplog: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise ValueError("a bug")

    async with client_of(app) as client:
        await client.send("/early", b"", method="GET")
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (500, "close")
    async with client_of(app) as client:
        await client.send("/late", b"", method="GET")
        assert not (await client.response()).is_whole
    assert "a bug" in caplog.text


async def test_an_application_that_waits_learns_that_its_client_has_left() -> None:
    waits, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            waits.set()
        left.set()

    async with client_of(app) as client:
        await client.send("/", b"", method="GET")
        await waits.wait()
        client.leave()
        await asyncio.wait_for(left.wait(), 10)


async def test_an_application_that_listens_on_learns_that_its_answer_is_complete() -> None:
    over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        await answering(200, b"all")(scope, receive, send)
        assert (await listening)["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        over.set()

    async with client_of(app) as client:
        await client.send("/", b"", method="GET")
        assert (await client.response()).body == b"all"
        await asyncio.wait_for(over.wait(), 10)


async def test_a_header_with_a_line_end_in_it_is_not_sent() -> None:
    headers = ((b"x-name", b"a\r\nset-cookie: b"),)
    async with client_of(answering(200, b"abc", headers=headers)) as client:
        await client.send("/", b"", method="GET")
        answer = await client.response()
        assert answer.status == 500
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("head", ["GET x:y:z HTTP/1.1", "CONNECT t:80 HTTP/1.1", "NO HTTP"])
async def test_what_is_no_request_is_answered_400_and_no_application_sees_it(head: str) -> None:
    async with client_of(None) as client:
        client.writer.write(f"{head}\r\nhost: t\r\n\r\n".encode())
        answer = await client.head()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.reader.read() == b""
