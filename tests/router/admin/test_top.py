"""`pdserve top`: what it makes of `/metrics`, and before a live router."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from pdserve.router.admin.top_cli import Sample, quantile, view
from pdserve.router.config.router import Admin
from pdserve.router.metrics.exposition import exposition
from pdserve.router.metrics.stats import Histogram, Snapshot
from tests.support.certificates import Authority
from tests.support.command import Done, pdserve_here
from tests.support.router.harness import CHAT, disagg
from tests.support.router.live_page import CACHED, KEY, shown
from tests.support.router.streams import TIMING, telling


def observed(*values_s: float) -> Histogram:
    histogram = Histogram()
    for value_s in values_s:
        histogram.observe(value_s)
    return histogram


STATES: dict[str, dict[str, int]] = {
    "[red]x": {},
    "draining": {"draining": 1},
    "failing": {"circuit_open": 1},
    "down": {"healthy": 0},
    "refused": {"refused": 1, "healthy": 0},
}
BEFORE = Snapshot(
    {"requests": {("/a", "200"): 1000, ("/b", "200"): 10}, "turn_tokens": {("1", "pool"): 100}},
    {"first_token_seconds": {("decode",): observed(1.0), ("router",): observed(0.0)}},
)
NOW = Snapshot(
    {
        "requests": {("/a", "200"): 4, ("/b", "200"): 10, ("/b", "502"): 2},  # a's process was replaced
        "stream_errors": {("timeout",): 2},
        "requests_in_flight": {(): 3},
        "tenant_waiting": {("t",): 4},
        "sessions": {(): 5},
        "turn_tokens": {("1", "pool"): 140, ("2", "pool"): 60, ("2", "computed"): 20},
        "worker_requests_in_flight": {(f"{name}:1", "decode"): 12 for name in STATES},
        **{
            f"worker_{gauge}": {
                (f"{name}:1", "decode"): of.get(gauge, int(gauge == "healthy")) for name, of in STATES.items()
            }
            for gauge in ("healthy", "draining", "circuit_open", "refused")
        },
    },
    {
        "first_token_seconds": {
            ("decode",): observed(1.0, 0.5, 0.5),
            ("pull",): observed(0.25, 0.25),
            ("router",): observed(0.0, 0.0, 0.0),
        },
        "time_to_first_byte_seconds": {("/a",): observed(0.0005), ("/b",): observed(0.0005)},
    },
)


def printed(before: Snapshot, now: Snapshot) -> str:
    out = io.StringIO()
    samples = (Sample(exposition(one).decode(), at_s) for one, at_s in ((before, 10.0), (now, 12.0)))
    Console(file=out, width=160, highlight=False, emoji=False, markup=False).print(view(*samples))
    return out.getvalue()


def test_what_is_shown_is_the_growth_between_two_samples() -> None:
    said = printed(BEFORE, NOW)
    for words in (
        *("3.0 requests/s", "2.0 failed/s", "3 in flight", "4 waiting", "5 sessions"),
        *("p50 0.5 ms, p90 0.9 ms", "pull 250.0 ms", "decode 500.0 ms"),
        *("pool 83.3 %", "computed 16.7 %", "[red]x:1"),
    ):
        assert words in said
    assert "settle" not in said
    states = [line.split()[2] for line in said.splitlines() if " decode " in line and ":1" in line]
    assert states == ["ready", "draining", "failing", "down", "refused"]
    said = printed(NOW, Snapshot(NOW.values | {"processes_silent": {(): 1}}, NOW.histograms))
    assert "first byte -; a router process does not answer" in said
    assert "first token" not in said


def test_quantiles_are_those_of_prometheus() -> None:
    for values_s, share, expected in (
        ([], 0.5, None),
        ([0.0005] * 10, 0.5, 0.0005),
        ([0.0015] * 10, 0.9, 0.001 + 0.9 * 0.0015),
        ([0.3] * 5 + [3.0] * 5, 0.8, 2.5 + 0.6 * 2.5),
        ([1000.0] * 10, 0.5, 120.0),
    ):
        found = quantile(dict(observed(*values_s).cumulative()), share)
        assert found == (None if expected is None else pytest.approx(expected))


async def top(*words: object, key: str = KEY) -> Done:
    return await asyncio.to_thread(pdserve_here, "top", *map(str, words), PDSERVE_ADMIN_KEY=key)


@pytest.mark.timeout(280)
async def test_the_command_shows_a_live_router_once_and_says_what_is_wrong() -> None:
    async with disagg(admin=Admin(key=KEY)) as (harness, _, [decode]), shown(harness) as url:
        asked = asyncio.create_task(top(url, "--once"))
        while not asked.done():
            decode.script(CHAT, telling(TIMING + CACHED))
            await harness.chat(stream=True)
            await asyncio.wait([asked], timeout=0.05)
        done = await asked
        assert done.returncode == 0, done.stderr
        assert decode.id in done.stdout
        assert "prompt tokens" in done.stdout
        for where, key, reason in (
            (url, "wrong-key-wrong-key", "the admin key is not right"),
            (f"http://{decode.id}", KEY, "it is no router's admin port"),
            ("http://127.0.0.1:1", KEY, "does not answer"),
            (url, "", "the admin key is needed"),
        ):
            done = await top(where, key=key)
            assert done.returncode in (1, 2)
            assert reason in done.stderr
            assert done.stderr.count("\n") == 1


@pytest.mark.timeout(120)
async def test_an_admin_port_with_a_certificate_speaks_tls_only_and_asks_for_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ours = authority.host(mutual=True)
    admin = Admin(key=KEY, tls=replace(ours, ca=None))
    async with disagg(admin=admin) as (harness, _, [decode]), shown(harness) as url:
        showing = ("--tls-ca", ours.ca, "--tls-certificate", ours.certificate, "--tls-key", ours.key)
        done = await top(url, "--once", *showing)
        assert done.returncode == 0, done.stderr
        assert decode.id in done.stdout
        for where, words in ((url, ("--tls-ca", ours.ca)), (url, ()), (url.replace("https", "http"), ())):
            done = await top(where, "--once", *words)
            assert done.returncode == 1
            assert "does not answer" in done.stderr
