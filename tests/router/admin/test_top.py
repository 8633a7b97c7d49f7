"""`pdserve top` before a live router."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from pdserve.kvpool.admin.sampling import Rates, Row
from pdserve.kvpool.admin.tables import make_console
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.router.admin.live_frames import (
    Frame,
    NodeView,
    Point,
    Problem,
    SpaceView,
    WorkerView,
    frame_of,
    point_of,
    quantile,
)
from pdserve.router.admin.top_cli import view
from pdserve.router.config.router import Admin
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Histogram, Snapshot
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


# --- Frames from samples: what the live page and `pdserve top` show


def observed(*values_s: float) -> Histogram:
    histogram = Histogram()
    for value_s in values_s:
        histogram.observe(value_s)
    return histogram


BEFORE = Snapshot(
    {"requests": {("/a", "200"): 10}, "turn_tokens": {("1", "pool"): 100}},
    {"first_token_seconds": {("decode",): observed(1.0), ("router",): observed(0.0)}},
)
NOW = Snapshot(
    {
        "requests": {("/a", "200"): 14, ("/b", "502"): 2},
        "stream_errors": {("timeout",): 2},
        "requests_in_flight": {(): 3},
        "worker_requests_in_flight": {("ready:1", "decode"): 12},
        "tenant_waiting": {("t",): 4},
        "sessions": {(): 5},
        "turn_tokens": {("1", "pool"): 140, ("2", "pool"): 60, ("2", "computed"): 20},
    },
    {
        "first_token_seconds": {
            ("decode",): observed(1.0, 0.5, 0.5),
            ("pull",): observed(0.25, 0.25),
            ("router",): observed(0.0, 0.0, 0.0),
        }
    },
)


def test_a_point_is_the_growth_between_two_samples() -> None:
    point = point_of(BEFORE, NOW, 2.0, 99.0)
    assert (point.at_s, point.requests_s, point.failed_s, point.in_flight) == (99.0, 3.0, 2.0, 3)
    assert point.parts_s == {"pull": 0.25, "decode": 0.5}
    assert point.tokens_s == {"pool": 50.0, "computed": 10.0}
    assert point.first_byte_p50_s is None


def test_a_counter_that_fell_counts_from_zero() -> None:
    before = Snapshot({"requests": {("/a", "200"): 1000}})
    assert point_of(before, BEFORE, 1.0, 0.0).requests_s == 10


@pytest.mark.parametrize(
    ("values_s", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.0005] * 10, 0.5, 0.0005),
        ([0.0015] * 10, 0.9, 0.001 + 0.9 * 0.0015),
        ([0.3] * 5 + [3.0] * 5, 0.8, 2.5 + 0.6 * 2.5),
        ([1000.0] * 10, 0.5, 120.0),
    ],
)
def test_quantiles_are_those_of_prometheus(values_s: list[float], share: float, expected: float) -> None:
    assert quantile(observed(*values_s), share) == (None if expected is None else pytest.approx(expected))


def test_a_histogram_that_fell_counts_from_zero() -> None:
    before = Snapshot({}, {"time_to_first_byte_seconds": {("/a",): observed(*[100.0] * 9)}})
    now = Snapshot({}, {"time_to_first_byte_seconds": {("/a",): observed(0.0005), ("/b",): observed(0.0005)}})
    point = point_of(before, now, 1.0, 0.0)
    assert (point.first_byte_p50_s, point.first_byte_p90_s) == (pytest.approx(0.0005), pytest.approx(0.0009))


def test_workers_have_one_state_and_the_pool_is_added_up() -> None:
    workers = {
        name: Worker("decode", f"http://{name}:1") for name in ("ready", "draining", "failing", "down", "no")
    }
    for name, worker in workers.items():
        worker.ready = name != "down"
    workers["draining"].drained = True
    workers["failing"].circuit.retry_at_s = 5.0
    workers["no"].refused = "it does not fit"
    space = m.NamespaceStatus(
        "s", 7, 700, {}, 3, 1, 5, 800, settings=NamespaceSettings(quota_bytes=1000), counters={}
    )
    report = m.StatusReport(0, "n", 1, 5.0, 100, 40, 30, 20, 10, 3, 2, 1, 4, [space])
    moved = Rates("s", read_bytes_s=10.0, hits_s=3.0, misses_s=1.0)
    rows = [
        Row(m.NodeAddress("n", "unix:/n"), report, "", moved, [moved]),
        Row(m.NodeAddress("o", "unix:/o"), report, "", moved, [moved]),
        Row(m.NodeAddress("p", "unix:/p"), None, "refused", Rates("p"), []),
    ]
    samples = NOW
    frame = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, workers.values(), rows, [])
    assert [view.state for view in frame.workers] == ["ready", "draining", "failing", "down", "refused"]
    assert (frame.waiting, frame.sessions) == (4, 5)
    assert [(node.node, node.error) for node in frame.nodes] == [("n", ""), ("o", ""), ("p", "refused")]
    [view] = frame.namespaces
    assert (view.pages, view.quota_bytes, view.evictions, view.hit_rate) == (14, 2000, 10, 0.75)


@pytest.mark.parametrize(("load", "elsewhere"), [(15, 3), (5, 0)])
def test_a_worker_is_shown_with_the_requests_of_all_processes(load: int, elsewhere: int) -> None:
    """Of its load, which this one counts as its own and others', what is of no process is elsewhere."""
    worker = Worker("decode", "http://ready:1")
    worker.in_flight, worker.elsewhere = 4, load - 4
    samples = NOW
    [seen] = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (12, elsewhere)


def test_a_worker_is_shown_without_requests_where_a_process_does_not_say_its_own() -> None:
    worker = Worker("decode", "http://ready:1")
    worker.in_flight, worker.elsewhere = 4, 5
    samples = Snapshot(NOW.values | {"processes_silent": {(): 1}})
    [seen] = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (None, 0)
