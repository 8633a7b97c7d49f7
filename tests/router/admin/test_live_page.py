"""The live page in a browser, and who may see it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

from pdserve.router.admin.app import password_as_bearer
from pdserve.router.config.router import Admin
from tests.support.router.harness import CHAT, disagg
from tests.support.router.live_page import CACHED, KEY, shown
from tests.support.router.mock_worker import MockWorker
from tests.support.router.streams import TIMING, telling

CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


def look(url: str, worker: MockWorker, drain: Any) -> None:
    """With a browser, on a desk and on a phone: while requests come, and when a worker drains."""
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        try:
            secret: Any = {"username": "anyone", "password": KEY}
            page = browser.new_page(http_credentials=secret, viewport={"width": 1280, "height": 1000})
            page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            expect.set_options(timeout=60_000)
            page.goto(url)
            expect(page.locator("#workers")).to_contain_text(worker.id)
            expect(page.locator("#state")).to_have_text("all workers are ready")
            expect(page.locator("#parts")).to_contain_text("decode")
            expect(page.locator("#tiers")).to_contain_text("pool 40.0 %")  # as `REPORT` says
            expect(page.locator("#now")).to_contain_text("ms")
            assert float(page.locator("#now dd").first.inner_text()) > 0
            assert "," in str(page.locator("#line").get_attribute("points"))
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            drain()
            expect(page.locator("#workers .bad")).to_have_text("draining")
            expect(page.locator("#state")).to_have_text("1 of 3 workers are not ready")
        finally:
            browser.close()
    assert problems == []


@pytest.mark.timeout(280)
async def test_the_page_shows_workers_and_where_time_and_tokens_go() -> None:
    async with disagg(decode=2, admin=Admin(key=KEY)) as (harness, _, decodes), shown(harness) as url:
        loop = asyncio.get_running_loop()

        def drain() -> None:
            members = harness.router.fleet.members
            loop.call_soon_threadsafe(members.drain, decodes[1].id, True)

        looking = asyncio.create_task(asyncio.to_thread(look, url, decodes[0], drain))
        while not looking.done():
            for decode in decodes:
                decode.scripts.pop(CHAT, None)
                decode.script(CHAT, *[telling(TIMING + CACHED)] * 8)
            assert (await harness.chat(stream=True)).status == 200
            await asyncio.wait([looking], timeout=0.2)
        await looking


@pytest.mark.timeout(120)
async def test_nobody_sees_the_page_without_the_key() -> None:
    async with disagg(admin=Admin(key=KEY)) as (harness, _, _), shown(harness) as url:  # noqa: SIM117
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for path in ("/", "/live", "/live/", "/metrics"):
                refused = await client.get(path)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"].startswith("Basic")
                assert (await client.get(path, auth=("x", "wrong-key-wrong-key"))).status_code == 401
            page = await client.get("/", auth=("x", KEY), follow_redirects=True)
            assert "<title>pdserve</title>" in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert (await client.get("/metrics", auth=("x", KEY))).status_code == 200
            # what acts, or shows more, takes no password that a browser sends by itself
            assert (await client.post("/reload", auth=("x", KEY))).status_code == 401
            assert (await client.get("/workers", auth=("x", KEY))).status_code == 401


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
