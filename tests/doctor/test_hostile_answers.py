"""Whoever answers the doctor may be hostile: a router, a worker or a pool node."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.doctor import cluster, judge, live_probe
from pdserve.doctor.cluster import MAX_BODY_BYTES, Asker, Member, NoAnswer, TooLate
from pdserve.doctor.facts import Finding
from pdserve.kvpool.protocol.cluster_messages import MAX_MEMBERS
from tests.support.command import pdserve_here
from tests.support.router.mock_worker import answer, workers
from tests.support.router.vllm_worker import VllmWorker

TOKEN = "the-token-of-the-operator"
SOON_S = 0.5
OK = "HTTP/1.1 200 OK\r\n"
Serve = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(serve: Serve) -> AsyncIterator[tuple[str, list[str]]]:
    """(URL, heads that were heard)"""
    heads: list[str] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            heads.append(head)
            await serve(head.split(" ")[1], writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            writer.close()

    async with await asyncio.start_server(one, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


def says(data: bytes, *, again: bytes = b"", pause_s: float = 0.0) -> Serve:
    """`data`, and then `again` without an end."""

    async def serve(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        while again:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return serve


async def say_half_a_body(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(f"{OK}content-length: 9\r\n\r\n1234".encode())
    await asyncio.Event().wait()


def whole(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"content-length: {len(body)}", *lines))
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def by_path(**answers: Any) -> Serve:
    """JSON by path, written with underscores."""

    async def serve(path: str, writer: asyncio.StreamWriter) -> None:
        found = answers.get(path.strip("/").replace("/", "_"), {})
        writer.write(whole(found if isinstance(found, bytes) else json.dumps(found).encode()))
        await writer.drain()

    return serve


NEVER_ENDING = {
    "a body in drops": says(f"{OK}content-length: 100000\r\n\r\n".encode(), again=b" ", pause_s=0.01),
    "a head in drops": says(OK.encode(), again=b"x: y\r\n", pause_s=0.01),
    "a body that does not come": say_half_a_body,
    "news before the answer": says(b"", again=b"HTTP/1.1 103 Early Hints\r\n\r\n", pause_s=0.01),
}
BAD = {
    "no HTTP": says(b"\x00\xff" * 999),
    "a body longer than any": says(
        f"{OK}transfer-encoding: chunked\r\n\r\n".encode(), again=b"10000\r\n" + b" " * 65536 + b"\r\n"
    ),
    "a body that is small only on its way": says(
        whole(gzip.compress(bytes(64 << 20)), "content-encoding: gzip")
    ),
    "nested without an end": says(whole(b"[" * 100_000)),
    "no JSON": says(whole(b"<html>")),
    "no UTF-8": says(whole(b'{"ready": true, "workers": [{"id": "\xff"}]}')),
    "a list": says(whole(b"[]")),
    "a number beyond all": says(
        whole(b'{"ready": true, "workers": 1e999, "meta_info": {"prompt_tokens": 1e999}}')
    ),
}


@pytest.mark.parametrize("what", NEVER_ENDING)
async def test_an_answer_without_an_end_is_waited_for_so_long_and_no_longer(what: str) -> None:
    async with answering(NEVER_ENDING[what]) as (url, _):
        with pytest.raises(TooLate):
            await asyncio.to_thread(Asker("").get, url, SOON_S)


@pytest.mark.parametrize("what", BAD)
async def test_whatever_comes_is_an_answer_or_none(what: str) -> None:
    async with answering(BAD[what]) as (url, _):
        members, why = await asyncio.to_thread(cluster.members, url)
        assert members == ()
        assert "does not answer as a router's does" in why
        (worker,) = await asyncio.to_thread(cluster.gather_workers, [Member(url)], "")
        assert "does not answer as a pdserve worker does" in worker.error
        found = await asyncio.to_thread(live_probe.probe, url, "m", 16, TOKEN, random.Random(1))
        assert "did not answer a prompt" in found.error


async def test_no_more_is_read_than_the_bound() -> None:
    sent = 0

    async def serve(path: str, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(f"{OK}content-length: {1 << 40}\r\n\r\n".encode())
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with answering(serve) as (url, _):
        with pytest.raises(NoAnswer, match="longer than"):
            await asyncio.to_thread(Asker("").get, url, 30.0)
    assert sent < 2 * MAX_BODY_BYTES


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent"])
async def test_a_token_does_not_follow_to_another_place(status: str) -> None:
    async with answering(says(whole(b"{}"))) as (other, heard_there):
        redirect = whole(b"", f"location: {other}/pd/ready", status=status)
        async with answering(says(redirect)) as (url, heard):
            (worker,) = await asyncio.to_thread(cluster.gather_workers, [Member(url)], TOKEN)
            found = await asyncio.to_thread(live_probe.probe, url, "m", 16, TOKEN, random.Random(1))
    assert "status 30" in worker.error
    assert "status 30" in found.error
    assert all(TOKEN in head for head in heard)
    assert heard_there == []


READY: dict[str, Any] = {"ready": True, "pool": "up"}
INFO: dict[str, Any] = {"role": "decode", "model": "m", "page_size": 16, "context_length": 4096}
ODD: dict[str, dict[str, Any]] = {
    "a page of all memory": {"pd_info": INFO | {"page_size": 10**15}},
    "no number": {"pd_info": INFO | {"context_length": [1]}},
    "a role that is none": {"pd_info": INFO | {"role": "boss"}},
    "a geometry that is none": {"pd_info": INFO | {"kv_geometry": [1]}},
    "tasks that are none": {"pd_info": INFO | {"tasks": 7}},
    "ready in words": {"pd_ready": {"ready": "yes"}},
}


@pytest.mark.parametrize("what", ODD)
async def test_a_worker_that_says_what_none_says_is_named_and_no_more(what: str) -> None:
    answers = {"pd_ready": READY, "pd_info": INFO} | ODD[what]
    async with answering(by_path(**answers)) as (url, _):
        (worker,) = await asyncio.to_thread(cluster.gather_workers, [Member(url)], "")
    assert "does not answer as a pdserve worker does" in worker.error
    assert len(worker.error) < 1000
    assert list(judge.workers([worker]))


async def test_pages_that_no_worker_has_are_not_probed_with() -> None:
    answers = {"pd_ready": READY, "pd_info": INFO | {"page_size": 10**12}}
    async with answering(by_path(**answers)) as (url, _):
        (worker,) = await asyncio.to_thread(cluster.gather_workers, [Member(url)], "")
    assert (worker.error, live_probe.page_sizes([worker])) == ("", {})


CARD: dict[str, Any] = {"id": "m", "owned_by": "vllm"}


@pytest.mark.parametrize(
    "cards",
    [{}, [CARD], {"data": []}, {"data": [{"id": "m"}]}],
    ids=["nothing", "a list", "no model", "no engine"],
)
@pytest.mark.parametrize("engine", ["", "vllm"])
async def test_a_server_that_is_no_vllm_after_all_is_named_and_no_more(cards: Any, engine: str) -> None:
    """`engine`: what the router said of it."""
    async with workers(server := VllmWorker("agg")):
        server.script("/v1/models", answer(200, cards))
        (worker,) = await asyncio.to_thread(cluster.gather_workers, [Member(server.url, "agg", engine)], "")
    assert f"does not answer as a {engine or 'pdserve'} worker does" in worker.error
    assert len(worker.error) < 1000
    assert list(judge.workers([worker]))


@pytest.mark.parametrize("date", ["", "x", "Mon, 99 Jan 99999 00:00:00 GMT"])
def test_a_date_that_is_none_says_nothing_of_a_clock(date: str) -> None:
    assert cluster._ahead_s(date, 0.0) == 0.0


async def test_a_router_that_names_more_workers_than_any_has_is_not_believed() -> None:
    many = {"workers": [{"id": f"10.0.0.1:{port}"} for port in range(5000)]}
    async with answering(by_path(ready=many)) as (url, _):
        urls, why = await asyncio.to_thread(cluster.members, url)
    assert urls == ()
    assert "1024" in why


async def test_more_pool_nodes_than_a_pool_has_are_not_asked() -> None:
    addresses = [f"unix:/nowhere/{number}" for number in range(MAX_MEMBERS + 7)]
    found = await asyncio.to_thread(cluster.gather_pool, [*addresses, "no address"])
    assert len(found) == MAX_MEMBERS + 1
    assert "8 more are named" in found[-1].error


async def test_nothing_that_is_said_acts_on_the_terminal() -> None:
    evil = "m\x1b[2J\n ok   all is well\u202e\x9b1m"
    answers = {"pd_ready": READY, "pd_info": INFO | {"model": evil, "tokenizer": evil}}
    async with answering(by_path(**answers, ready={"workers": None})) as (url, _):
        done = await asyncio.to_thread(
            pdserve_here, "doctor", "--no-self-check", "--no-probe", "--worker", url, "--router", url
        )
    assert done.stdout
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert not any(line.startswith(" ok") for line in done.stdout.splitlines())
    assert "\\x1b[2J\\n ok   all is well" in done.stdout


def test_a_finding_is_shown_in_one_line() -> None:
    from pdserve.security.log_text import MAX_CHARS, printable

    assert printable("a\r\nb\x00\ud800") == "a\\r\\nb\\x00\\ud800"
    assert len(printable("x" * 10**6)) <= MAX_CHARS + 3
    assert Finding("c", "ok", "é 漢").says == printable("é 漢")
