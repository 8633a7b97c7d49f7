"""The live page in a browser, and who may see it."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.router.admin.live import LiveFeed, password_as_bearer
from pdserve.router.config.router import Admin
from tests.support.e2e.cluster import PoolNode
from tests.support.router.harness import disagg
from tests.support.router.live_page import CACHED, KEY, shown
from tests.support.router.mock_worker import REPORT, answer
from tests.support.router.streams import TIMING, telling

CHAT = "/v1/chat/completions"
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
FOUND = {"device": 4, "host": 0, "pool": 22}
EVIL = "<img src=x onerror=document.title='owned'>"
CLIPPED = (
    "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
)


def put_pages(node: PoolNode) -> None:
    """Ten pages in a namespace, five of them read, one missed."""
    config = PoolClientConfig(nodes=[PoolNodeRef(**node.ref)])
    client = PoolClient(config, EVIL, {"a": "b"}, name="test")
    page = [np.zeros(64 * 1024, np.uint8)]
    assert all(client.put([bytes([n]) * 32 for n in range(10)], [page] * 10))
    assert (
        client.get([bytes([n]) * 32 for n in range(5, 11)], [[page[0].copy()] for _ in range(6)]).count(True)
        == 5
    )
    client.close()


def look(url: str, node: PoolNode, drain: Any) -> None:
    """With a browser: what is there, on a desk and on a phone, by day and by night."""
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        try:
            secret: Any = {"username": "anyone", "password": KEY}
            page = browser.new_page(http_credentials=secret, viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(60_000)
            expect.set_options(timeout=60_000)
            page.on(
                "console", lambda message: problems.append(message.text) if message.type == "error" else None
            )
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(url)
            expect(page.locator("#state")).to_have_text("all 4 parts are up")
            for word in ("prefill", "pull", "decode", "router"):
                expect(page.locator("#parts-legend")).to_contain_text(word)
            for word in ("device", "pool", "computed"):
                expect(page.locator("#tiers-legend")).to_contain_text(word)
            expect(page.locator("#tiers-chart polygon").first).to_be_visible()
            expect(page.locator("#namespaces tbody")).to_contain_text(EVIL)  # as text
            expect(page.locator("#nodes tbody")).to_contain_text("pool0")
            expect(page.locator("#problems")).to_contain_text("a warning of the test (")
            expect(page.locator("#problems li")).to_have_count(1)
            expect(page.locator("#sessions")).to_have_text("1")
            assert page.title() == "pdserve"
            assert page.evaluate(CLIPPED) == []
            day = _colour(page)
            page.emulate_media(color_scheme="dark")
            assert _colour(page) != day
            page.set_viewport_size({"width": 390, "height": 844})
            _colour(page)
            drain()
            expect(page.locator("#workers tbody")).to_contain_text("draining")
            node.stop()
            expect(page.locator("#state")).to_have_text("1 of 4 parts are not well")
            expect(page.locator("#nodes .long")).to_contain_text("pool0")
            assert page.evaluate(
                "document.querySelector('.long span').getBoundingClientRect().right <= innerWidth"
            )
            _colour(page)
        finally:
            browser.close()
    assert problems == []


def _colour(page: Page) -> str:
    """The background, once it is seen that nothing is wider than the screen."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[PoolNode]:
    started = PoolNode(tmp_path, capacity="16MiB").start()
    yield started
    started.stop()


@pytest.mark.timeout(280)
async def test_the_page_shows_workers_flow_caches_pool_and_errors(node: PoolNode) -> None:
    put_pages(node)
    admin = Admin(key=KEY, pool=(node.address,))
    async with disagg(decode=2, decode_policy="affinity", admin=admin) as (harness, [prefill], decodes):  # noqa: SIM117
        async with shown(harness) as url:
            loop = asyncio.get_running_loop()

            def drain() -> None:
                worker = decodes[1].id
                loop.call_soon_threadsafe(harness.router.fleet.members.drain, worker, True)

            looking = asyncio.create_task(asyncio.to_thread(look, url, node, drain))
            while not looking.done():
                prefill.script("/pd/prefill", *[answer(200, REPORT | {"cached": FOUND})] * 3)
                for decode in decodes:
                    decode.scripts.pop(CHAT, None)
                    decode.script(CHAT, *[telling(TIMING + CACHED)] * 8)
                for _ in range(3):
                    assert (await harness.chat(stream=True, user="u")).status == 200
                logging.getLogger("pdserve.test").warning("a warning of the test")
                await asyncio.wait([looking], timeout=0.2)
            await looking


@pytest.mark.timeout(120)
async def test_nobody_sees_the_page_without_the_key() -> None:
    async with disagg(admin=Admin(key=KEY)) as (harness, _, _), shown(harness) as url:  # noqa: SIM117
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for path in ("/", "/live", "/live/", "/live/page.js", "/live/events", "/live/frame"):
                refused = await client.get(path)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"].startswith("Basic")
                assert (await client.get(path, auth=("x", "wrong-key-wrong-key"))).status_code == 401
            page = await client.get("/", auth=("x", KEY), follow_redirects=True)
            assert "<title>pdserve</title>" in page.text
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert (await client.get("/live/../admin.py", auth=("x", KEY))).status_code in (401, 404)
            # what acts takes no password that a browser sends by itself
            assert (await client.post("/reload", auth=("x", KEY))).status_code == 401
            while (frame := await client.get("/live/frame", auth=("x", KEY))).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert {worker["state"] for worker in frame.json()["workers"]} == {"ready"}


async def test_a_listener_that_leaves_is_forgotten() -> None:
    async with disagg(admin=Admin(key=KEY)) as (harness, _, _):
        feed = LiveFeed(harness.router, 0.05)
        feeding = asyncio.create_task(feed.run())
        events = feed.events()
        assert (await anext(events)).startswith(b"event: history\n")
        assert (await anext(events)).startswith(b"event: frame\n")
        assert feed.listeners == 1
        await events.aclose()  # type: ignore[attr-defined]
        assert feed.listeners == 0
        feeding.cancel()


def test_passwords_of_basic_become_bearer_tokens() -> None:
    for given, expected in (
        (b"Basic " + base64.b64encode(b"me:a:b"), b"Bearer a:b"),
        (b"basic " + base64.b64encode(b"none"), b"Bearer "),
        (b"Basic ???", b"Bearer "),
        (b"Bearer x", b"Bearer x"),
    ):
        headers = {b"authorization": given}
        password_as_bearer(headers)
        assert headers[b"authorization"] == expected
