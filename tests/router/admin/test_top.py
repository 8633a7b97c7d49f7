"""`pdserve top` before a live router."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from pdserve.kvpool.admin.tables import make_console
from pdserve.router.admin.live_frames import Frame, NodeView, Point, Problem, SpaceView, WorkerView
from pdserve.router.admin.top_cli import decode, view
from pdserve.router.config.router import Admin
from tests.support.certificates import Authority
from tests.support.command import Done, pdserve_here
from tests.support.router.harness import disagg
from tests.support.router.live_page import CACHED, KEY, shown
from tests.support.router.streams import TIMING, telling

CHAT = "/v1/chat/completions"
FRAME = Frame(
    Point(0.0, 12.0, 1.5, 3, 0.01, 0.02, {"prefill": 0.03, "pull": 0.01}, {"pool": 75.0, "computed": 25.0}),
    2.0,
    4,
    5,
    [
        WorkerView("a:1", "decode", "ready", 2, 1, 100, None),
        WorkerView("c:1", "decode", "ready", None, 0, 0, None),
        WorkerView("b:1", "prefill", "refused", 0, 0, 0, 5, "no [fit]"),
    ],
    [NodeView("n0", "", 50, 100, 7, 2, 3.0, 1024.0, 2048.0, 0.5), NodeView("n1", "refused")],
    [SpaceView("[bold]x", 7, 700, 800, 1600, 9, 0.5, None)],
    [Problem(0.0, "error", "it [broke]", 3)],
)


def printed(frame: Frame) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False, emoji=False, markup=False).print(view(frame))
    return out.getvalue()


def test_a_frame_is_shown_whole_and_names_are_no_markup() -> None:
    said = printed(FRAME)
    for word in (
        *(
            "12 requests/s",
            "1.5 failed/s",
            "3 in flight",
            "4 waiting",
            "5 sessions",
            "p50 10.0 ms, p90 20.0 ms",
        ),
        *("prefill 30.0 ms", "pull 10.0 ms", "pool 75.0 %", "computed 25.0 %", "2 + 1", "?", "refused"),
        *("50.0 %", "n1: refused", "[bold]x", "it [broke] (3 times)", "b:1: no [fit]", "1 KiB", "2 KiB"),
    ):
        assert word in said
    assert "first token" not in printed(msgspec.structs.replace(FRAME, point=Point(0.0)))
    assert make_console().width >= 80


def test_frames_are_found_among_events() -> None:
    data = msgspec.json.encode(FRAME).decode()
    lines = ["event: history", "data: []", "", "event: frame", f"data: {data}", "", ": a comment", "data"]
    assert list(decode(lines)) == [FRAME]


@pytest.mark.timeout(280)
async def test_the_command_shows_a_live_router_once_and_says_what_is_wrong() -> None:
    def top(*words: str, key: str = KEY) -> asyncio.Future[Done]:
        return asyncio.ensure_future(asyncio.to_thread(pdserve_here, "top", *words, PDSERVE_ADMIN_KEY=key))

    async with disagg(admin=Admin(key=KEY)) as (harness, _, [decode]), shown(harness) as url:
        frame: dict[str, Any] = {"point": {"parts_s": {}}}
        while not {"prefill", "decode"} <= set(frame["point"]["parts_s"]):  # a request in its time, whole
            asked = top(url, "--once", "--json")
            while not asked.done():
                decode.script(CHAT, telling(TIMING + CACHED))
                await harness.chat(stream=True)
                await asyncio.wait([asked], timeout=0.05)
            done = await asked
            assert done.returncode == 0
            frame = json.loads(done.stdout)
        assert frame["point"]["requests_s"] > 0
        assert {worker["id"] for worker in frame["workers"]} >= {decode.id}
        for where, key, reason in (
            (url, "wrong-key-wrong-key", "the admin key is not right"),
            (harness.url, KEY, "it is no admin port"),
            ("http://127.0.0.1:1", KEY, "does not answer"),
            (url, "", "the admin key is needed"),
        ):
            done = await top(where, key=key)
            assert done.returncode in (1, 2)
            assert reason in done.stderr
            assert done.stderr.count("\n") == 1


@pytest.mark.timeout(60)
async def test_an_admin_port_with_a_certificate_speaks_tls_only_and_asks_for_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = authority.host(mutual=True)
    admin = Admin(key=KEY, tls=replace(ours, ca=None))

    async def top(url: str, *words: object) -> Done:
        said = ("top", url, "--once", "--json", *map(str, words))
        return await asyncio.to_thread(pdserve_here, *said, PDSERVE_ADMIN_KEY=KEY)

    async with disagg(admin=admin) as (harness, _, [decode]), shown(harness) as url:
        showing = ("--tls-ca", ours.ca, "--tls-certificate", ours.certificate, "--tls-key", ours.key)
        done = await top(url, *showing)
        assert done.returncode == 0, done.stderr
        assert decode.id in done.stdout
        for where, words in (
            (url, ("--tls-ca", ours.ca)),
            (url, ()),
            (url.replace("https", "http"), ()),
        ):
            done = await top(where, *words)
            assert done.returncode == 1
            assert "does not answer" in done.stderr


@pytest.mark.timeout(60)
async def test_a_renewed_certificate_of_the_admin_port_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its authority is renewed too: both for itself and for the clients that it lets in."""
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)
    older, newer = Authority(tmp_path / "older"), Authority(tmp_path / "newer")
    files = older.host(mutual=True)
    admin = Admin(key=KEY, tls=replace(files, ca=None))

    async def top(authority: Authority, url: str) -> int:
        certificate, key = authority.files("operator")
        showing = ("--tls-ca", authority.ca, "--tls-certificate", certificate, "--tls-key", key)
        said = ("top", url, "--once", "--json", *map(str, showing))
        return (await asyncio.to_thread(pdserve_here, *said, PDSERVE_ADMIN_KEY=KEY)).returncode

    async with disagg(admin=admin) as (harness, _, _), shown(harness) as url:
        assert [await top(authority, url) for authority in (older, newer)] == [0, 1]
        theirs = newer.host(mutual=True)
        for ours, new in (
            (files.key, theirs.key),
            (files.certificate, theirs.certificate),
            (files.client_ca, theirs.client_ca),
        ):
            assert ours is not None
            assert new is not None
            renewed = ours.with_suffix(".new")
            shutil.copy(new, renewed)
            renewed.replace(ours)
        assert await top(newer, url) == 0
        assert (await harness.chat()).status == 200
