"""A node's metrics: counted, labelled, served."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import StartupError
from pdserve.kvpool.node.metrics.families import METRICS, NodeSnapshot, families
from pdserve.kvpool.node.metrics.meter import BUCKETS_S, NO_NAMESPACE, Meter, Series
from pdserve.kvpool.node.metrics.server import MAX_HEAD_BYTES, MAX_SCRAPERS, MetricsServer
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Member, NamespaceSettings, TierStatus
from tests.support.kvpool.nodes import PAGE_BYTES, Start, get, keys, open_namespace, put
from tests.support.waiting import soon

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def report(*spaces: m.NamespaceStatus, **more: object) -> m.StatusReport:
    return m.StatusReport(0, "n", 1, 5.0, 100, 40, 30, 20, 10, 3, 2, 1, 4, list(spaces), **more)  # type: ignore[arg-type]


def snapshot(found: m.StatusReport, series: dict[tuple[str, int], Series] | None = None) -> NodeSnapshot:
    names = {number: space.name for number, space in enumerate(found.namespaces, 1)}
    return NodeSnapshot(found, series or {}, names, Series(), 5)


def values(of: NodeSnapshot) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families(of)
        for sample in family.samples
    }


def value(found: Values, name: str, **labels: str) -> float:
    return found["pdserve_pool_" + name, frozenset(labels.items())]


# --- from a snapshot to samples


def test_every_metric_of_the_list_is_there_and_no_other() -> None:
    found = {family.name for family in families(snapshot(report()))}
    assert found == {"pdserve_pool_" + definition.name for definition in METRICS}


def test_figures_of_tenants_are_their_models_and_the_largest_have_a_label_of_their_own() -> None:
    tenants = [m.NamespaceStatus(f"a#t{i}", 1, 10, {}, slot_bytes=20 + i, tier_bytes=1) for i in range(60)]
    found = values(snapshot(report(m.NamespaceStatus("a", 1, 10, {}, slot_bytes=20), *tenants)))
    assert value(found, "pages", namespace="a", place="dram") == 61
    assert value(found, "tenant_bytes", tenant="t59", place="dram") == 79
    assert value(found, "tenant_bytes", tenant="(others)", place="dram") == sum(range(20, 30))
    assert value(found, "tenant_bytes", tenant="(others)", place="below") == 10
    assert len([name for name, _ in found if name == "pdserve_pool_tenant_bytes"]) == 2 * 51


def test_a_namespace_becomes_its_samples() -> None:
    space = m.NamespaceStatus(
        "a",
        7,
        700,
        {},
        hits=3,
        misses=1,
        evictions=5,
        slot_bytes=800,
        replicas=2,
        tier_pages=9,
        tier_bytes=900,
        settings=NamespaceSettings(quota_bytes=1000),
        counters={"operations": 8, "hits_below": 1, "read_bytes": 300, "evicted_quota": 2, "delayed": 4},
    )
    tier = TierStatus("disk", "ssd", 50, 40, 9, False, {"torn": 1})
    members = [Member("n", "a", 1, 1, 1, 0, 4), Member("o", "b", 1, 1, 1, 3)]
    counters = {"discarded": 6, "tail_bytes": 11, "commits": 12}
    found = values(snapshot(report(space, counters=counters, tiers=[tier], members=members, epoch=5)))
    assert value(found, "hits_total", namespace="a") == 3
    assert value(found, "read_bytes_total", namespace="a") == 300
    assert value(found, "found_pages_total", namespace="a", place="dram") == 2
    assert value(found, "found_pages_total", namespace="a", place="below") == 1
    assert value(found, "pages", namespace="a", place="dram") == 7
    assert value(found, "page_bytes", namespace="a", place="below") == 900
    assert value(found, "slot_bytes", namespace="a") == 800
    assert value(found, "quota_bytes", namespace="a") == 1000
    assert value(found, "evictions_total", namespace="a", reason="room") == 3
    assert value(found, "evictions_total", namespace="a", reason="quota") == 2
    assert value(found, "namespace_events_total", namespace="a", event="delayed") == 4
    assert value(found, "checksum_failures_total") == 6
    assert value(found, "tail_bytes") == 11
    assert value(found, "events_total", event="commits") == 12
    assert value(found, "tier_used_bytes", tier="disk", kind="ssd") == 40
    assert value(found, "tier_writable", tier="disk", kind="ssd") == 0
    assert value(found, "tier_events_total", tier="disk", event="torn") == 1
    assert value(found, "members", status="active") == 1
    assert value(found, "members", status="dead") == 1
    assert value(found, "settled") == 0
    assert (
        sum(value(found, "memory_bytes", state=s) for s in ("free", "used", "reserved", "quarantined")) == 100
    )


# --- counting


def test_requests_are_counted_by_namespace_kind_and_outcome() -> None:
    now_s = [0.0]
    known = {5, 6}
    meter = Meter([5, 6], known, lambda: now_s[0])
    get_5 = meter.begin(m.Get(1, 5, [], [1]), 0.0)
    commit_6 = meter.begin(m.Commit(2, [1], [1], [0]), 0.0)
    unknown = [meter.begin(m.Get(3, number, [], [1]), 0.0) for number in range(100, 200)]
    outside = meter.begin(m.Commit(4, [1 << 40], [1], [0]), 0.0)
    now_s[0] = 0.003
    meter.end(get_5, m.Got(1, []))
    meter.end(commit_6, m.Committed(2, b""))
    for each in unknown:
        meter.end(each, m.Fault(3, "unknown_namespace", ""))
    now_s[0] = 100.0
    meter.end(outside, m.Committed(4, b""))
    found = meter.snapshot()
    assert found.keys() == {("Get", 5), ("Commit", 6), ("Get", NO_NAMESPACE), ("Commit", NO_NAMESPACE)}
    assert found["Get", 5].counts[BUCKETS_S.index(0.005)] == 1
    assert found["Get", NO_NAMESPACE].refused == 100
    assert found["Commit", NO_NAMESPACE].counts[-1] == 1
    assert found["Commit", NO_NAMESPACE].sum_s == 100.0
    known.clear()
    assert {number for _, number in meter.snapshot()} == {NO_NAMESPACE}, "those that are gone are forgotten"


# --- serving


def scrape(url: str) -> Values:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_real_node_is_scraped(start: Start) -> None:
    pool = start()
    pool.kill()
    pool.restart(metrics="127.0.0.1:0")
    found = re.search(r"metrics at (http://\S+)", pool.log())
    assert found
    connection = pool.connect()
    ns = open_namespace(connection, "qwen")
    some = keys(5, 2)
    put(connection, ns, some)
    assert len(get(connection, ns, [*some, bytes(32)])) == 5
    connection.call(m.Exists(9, 77, some), soon())
    now = scrape(found[1])
    assert value(now, "hits_total", namespace="qwen") == 5
    assert value(now, "misses_total", namespace="qwen") == 1
    assert value(now, "read_bytes_total", namespace="qwen") == 5 * PAGE_BYTES
    assert value(now, "written_pages_total", namespace="qwen") == 5
    for operation in ("Get", "Reserve", "Commit"):
        assert value(now, "operations_total", namespace="qwen", operation=operation, outcome="ok") == 1
        assert value(now, "operation_seconds_count", namespace="qwen", operation=operation) == 1
        assert 0 < value(now, "operation_seconds_sum", namespace="qwen", operation=operation) < 1
    assert value(now, "operations_total", namespace="", operation="Exists", outcome="refused") == 1
    assert value(now, "connections") == 1
    assert now["process_open_fds", frozenset()] > 0
    assert value(scrape(found[1]), "uptime_seconds") >= value(now, "uptime_seconds")
    connection.close()


@contextlib.asynccontextmanager
async def served(token: str = "", address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, int]]:
    """A report's metrics: their URL and port, free again afterwards."""
    server = MetricsServer(lambda: snapshot(report()), Series(), token)
    url = await server.start(address)
    try:
        yield url, int(url.removesuffix("/metrics").rpartition(":")[2])
    finally:
        server.close()


async def ask(url: str, method: str = "GET", shown: str = "") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, url, headers={"authorization": shown.encode("latin-1")})


TOKEN = "the-token-of-the-scrapers"


@pytest.mark.parametrize(
    ("token", "shown", "method", "path", "status"),
    [
        ("", "", "GET", "/metrics", 200),
        ("", "", "GET", "/x", 404),
        ("", "", "POST", "/metrics", 405),
        (TOKEN, f"Bearer {TOKEN}", "GET", "/metrics", 200),
        *((TOKEN, "", "GET", path, 401) for path in ("/metrics", "/", "/x")),
        *(
            (TOKEN, shown, "GET", "/metrics", 401)
            for shown in ("Bearer wrong", f"Basic {TOKEN}", "Bearer \u00e9")
        ),
    ],
)
async def test_metrics_are_for_who_shows_the_token_and_asks_for_them(
    token: str, shown: str, method: str, path: str, status: int
) -> None:
    async with served(token) as (url, _):
        answer = await ask(url.replace("/metrics", path), method, shown)
    assert answer.status_code == status
    assert ('pdserve_pool_node_info{node="n"} 1' in answer.text) == (status == 200)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_an_address_of_either_kind_is_had_once_and_free_again_after_the_end(host: str) -> None:
    async with served(address=f"{host}:0") as (url, port):
        assert (await ask(url)).status_code == 200
        with pytest.raises(StartupError, match="cannot be served at"):
            await MetricsServer(lambda: snapshot(report()), Series()).start(f"{host}:{port}")
    async with served(address=f"{host}:{port}"):
        pass


async def test_clients_that_say_nothing_or_too_much_keep_no_scraper_out() -> None:
    async with served() as (url, port):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_SCRAPERS)]
        assert await asyncio.wait_for(opened[0][0].read(), 10) == b"", "the oldest went"
        assert (await ask(url)).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * (2 * MAX_HEAD_BYTES))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, one in [*opened, (reader, writer)]:
            one.close()
