"""One view over several routers, whichever is asked."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from pdserve.discovery.workers import WorkerEtcdConfig
from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.live_feed import LiveFeed
from pdserve.router.admin.live_frames import Frame
from pdserve.router.admin.other_routers import FIGURES, Figures, OtherRouters, Silent, encode
from pdserve.router.config.router import Admin, RouterConfig
from pdserve.router.metrics.snapshot import Snapshot
from pdserve.router.metrics.stats import Histogram
from pdserve.router.server.listening import bind
from pdserve.router.server.uvicorn_server import make_server
from tests.support.command import Done, pdserve_here
from tests.support.kvpool.etcd_server import EtcdServer
from tests.support.processes import free_ports
from tests.support.router.harness import PATIENT, Harness, routed
from tests.support.router.live_page import KEY
from tests.support.router.mock_worker import MockWorker, workers


class Place(NamedTuple):
    """A router with an admin port."""

    url: str
    harness: Harness
    feed: LiveFeed

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}, trust_env=False) as client:
            return (await client.get(self.url + path)).json()

    async def frame(self, fits: Callable[[Frame], bool]) -> Frame:
        """The first one that is as wanted."""
        async with asyncio.timeout(60):
            while True:
                await self.feed._sample()
                if self.feed.frame is not None and fits(self.feed.frame):
                    return self.feed.frame
                await asyncio.sleep(0.01)


@asynccontextmanager
async def place(config: RouterConfig, port: int) -> AsyncIterator[Place]:
    """A router whose admin port is that one."""
    async with routed(config) as harness:
        others = OtherRouters(config)
        feed = LiveFeed(harness.router, others, 0.05)
        server = make_server(AdminApp(harness.router, others, feed), config, None)
        listening = bind("127.0.0.1", port)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        feeding = asyncio.create_task(feed.run())
        try:
            yield Place(f"http://127.0.0.1:{port}", harness, feed)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await others.close()
            server.should_exit = server.force_exit = True
            await serving
            listening.close()


@asynccontextmanager
async def places(count: int, **more: Any) -> AsyncIterator[tuple[list[Place], MockWorker]]:
    """Routers before one worker, each with a list of all of them, itself too."""
    ports = free_ports(count)
    urls = tuple(f"http://127.0.0.1:{port}/" for port in ports)
    worker = MockWorker("agg")
    async with workers(worker), AsyncExitStack() as stack:
        config = RouterConfig(
            agg=(worker.url,), deadlines=PATIENT, admin=Admin(key=KEY, routers=urls), **more
        )
        yield [await stack.enter_async_context(place(config, port)) for port in ports], worker


async def test_whichever_is_asked_all_are_shown_and_added_up() -> None:
    async with places(3) as ((first, second, third), worker):
        for one in (first, second, second, third):
            assert (await one.harness.chat()).status == 200
        for one in (first, third):
            frame = await one.frame(lambda frame: len(frame.routers) == 3)
            assert frame.routers[0].name == "this router"
            assert {router.name for router in frame.routers[1:]} < {
                each.url.removeprefix("http://") for each in (first, second, third)
            }
            assert not any(router.error for router in frame.routers)
        (tenant,) = (await first.get("/tenants"))["tenants"]
        assert tenant["use"]["requests"] == 4
        (told,) = (await second.get("/workers"))["workers"]
        assert (told["id"], told["in_flight"]) == (worker.id, 0)


async def test_rates_are_of_what_was_seen_twice() -> None:
    """A router that comes, or comes back, has answered nothing in that moment."""
    async with places(2) as ((first, second), _):
        for _ in range(5):
            await second.harness.chat()
        second.feed._others.router = "before its restart"
        await first.frame(lambda frame: len(frame.routers) == 2)
        second.feed._others.router = "after its restart"
        frame = await first.frame(lambda frame: len(frame.routers) == 2)
        assert frame.point.requests_s == 0.0
        await second.harness.chat()
        await first.frame(lambda frame: frame.point.requests_s > 0 and frame.routers[1].requests_s > 0)


async def test_a_router_that_is_away_is_named_and_what_needs_it_is_unknown() -> None:
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with places(1) as ((one,), _):
        others = one.feed._others
        others._listed = (*others._listed, away)
        frame = await one.frame(lambda frame: len(frame.routers) == 2)
        assert (frame.routers[1].name, bool(frame.routers[1].error)) == (away[7:], True)
        assert (await one.get("/workers"))["workers"][0]["in_flight"] is None
        assert "error" in await one.get("/tenants")


async def test_warnings_of_all_routers_are_shown_with_their_router() -> None:
    async with places(2) as ((first, second), _):
        second.feed._problems.kept.clear()
        second.feed._problems.emit(_record("it is late"))
        frame = await first.frame(lambda frame: any("late" in one.text for one in frame.problems))
        assert second.url.removeprefix("http://") in {
            one.router for one in frame.problems if "late" in one.text
        }


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("pdserve.test", logging.WARNING, "", 0, text, None, None)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xc1",
        b"garbage" * 1000,
        encode(Figures("x", "y", Snapshot(histograms={"queue_wait_seconds": {(): Histogram([1, 2], 0.0)}}))),
        b"\x00" * (17 << 20),
        None,
    ],
)
async def test_an_admin_port_that_says_garbage_or_nothing_is_silent(said: bytes | None) -> None:
    """None: it never answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if said is None:
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(said))
            writer.write(said)
        with suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    others = OtherRouters(RouterConfig(admin=Admin(key=KEY, routers=(f"http://127.0.0.1:{port}",))))
    (silent,) = await others.ask()
    assert isinstance(silent, Silent)
    assert (silent.name, bool(silent.error)) == (f"127.0.0.1:{port}", True)
    await others.close()
    server.close()


async def test_figures_need_the_admin_key() -> None:
    async with places(1) as ((one,), _), httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(one.url + FIGURES)).status_code == 401


@pytest.mark.timeout(120)
async def test_routers_find_each_other_in_etcd_and_top_finds_them(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path)
    ports, worker = free_ports(2), MockWorker("agg")
    settings = WorkerEtcdConfig(endpoints=[etcd.url], lease_s=2, timeout_s=1.0, retry_s=0.1)

    async def top(*words: str) -> Done:
        return await asyncio.to_thread(pdserve_here, "top", *words, "--once", "--json", PDSERVE_ADMIN_KEY=KEY)

    async with workers(worker), AsyncExitStack() as stack:
        made = []
        for port in ports:
            admin = Admin(key=KEY, advertise=f"http://127.0.0.1:{port}")
            config = RouterConfig(agg=(worker.url,), deadlines=PATIENT, admin=admin, etcd=settings)
            made.append(await stack.enter_async_context(place(config, port)))
        for one in made:
            await one.frame(lambda frame: len(frame.routers) == 2)
        done = await top("--etcd", etcd.url)
        assert done.returncode == 0, done.stderr
        frame = json.loads(done.stdout)
        assert [router["name"] for router in frame["routers"]].count("") == 0
        assert {router["name"] for router in frame["routers"]} == {f"127.0.0.1:{port}" for port in ports}
        done = await top("http://127.0.0.1:1", made[1].url)  # the first one is away
        assert done.returncode == 0, done.stderr
    done = await top("--etcd", etcd.url)
    assert (done.returncode, "etcd has no router" in done.stderr) == (1, True)
    etcd.kill()
