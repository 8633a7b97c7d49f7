"""A node's metrics: counted, labelled, served."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.metrics.families import NodeSnapshot, families
from pdserve.kvpool.node.metrics.meter import BUCKETS_S, NO_NAMESPACE, LoopLag, Meter, Series
from pdserve.kvpool.node.metrics.names import METRICS
from pdserve.kvpool.node.metrics.server import MAX_HEAD_BYTES, MAX_SCRAPERS, MetricsServer
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Member, NamespaceSettings, TierStatus
from pdserve.settings.config_file import load_config
from tests.support.kvpool.nodes import PAGE_BYTES, Start, get, keys, open_namespace, put, soon

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def report(*spaces: m.NamespaceStatus, **more: object) -> m.StatusReport:
    return m.StatusReport(0, "n", 1, 5.0, 100, 40, 30, 20, 10, 3, 2, 1, 4, list(spaces), **more)  # type: ignore[arg-type]


def snapshot(found: m.StatusReport, series: dict[tuple[str, int], Series] | None = None) -> NodeSnapshot:
    names = {number: space.name for number, space in enumerate(found.namespaces, 1)}
    return NodeSnapshot(found, series or {}, names, Series(), 5)


def of_report(token: str = "") -> MetricsServer:
    return MetricsServer(lambda: snapshot(report()), LoopLag(), token)


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
    meter = Meter([5, 6], {5, 6}, lambda: now_s[0])
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


def test_a_namespace_that_is_gone_is_forgotten() -> None:
    known = {5}
    meter = Meter([], known, lambda: 0.0)
    meter.end(meter.begin(m.Exists(1, 5, []), 0.0), m.Present(1, b""))
    assert meter.snapshot()
    known.clear()
    assert not meter.snapshot()


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
    found = re.search(r"metrics at (http://\S+)", pool.log.read_text())
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


async def test_a_server_stops_and_its_address_can_be_used_again() -> None:
    first, second = of_report(), of_report()
    address = (await first.start("127.0.0.1:0")).removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(StartupError, match="cannot be served at"):
        await second.start(address)
    first.close()
    await second.start(address)
    second.close()


async def test_metrics_with_a_token_are_for_who_shows_it() -> None:
    token = "the-token-of-the-scrapers"
    serving = of_report(token)
    url = await serving.start("127.0.0.1:0")
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            for shown in ("", "Bearer wrong", f"Basic {token}", "Bearer \u00e9"):
                for path in ("/metrics", "/", "/x"):
                    shown_header = {"authorization": shown.encode("latin-1")}
                    answer = await client.get(url.replace("/metrics", path), headers=shown_header)
                    assert answer.status_code == 401
                    assert "pdserve_pool" not in answer.text
            answer = await client.get(url, headers={"authorization": f"Bearer {token}"})
            assert 'pdserve_pool_node_info{node="n"} 1' in answer.text
    finally:
        serving.close()


async def test_clients_that_say_nothing_keep_no_scraper_out() -> None:
    serving = of_report()
    url = await serving.start("127.0.0.1:0")
    port = int(url.removesuffix("/metrics").rpartition(":")[2])
    silent: list[asyncio.StreamWriter] = []
    try:
        for n in range(2 * MAX_SCRAPERS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            silent.append(writer)
            if n == 0:
                oldest = reader
        assert await asyncio.wait_for(oldest.read(), 10) == b""
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
    finally:
        for writer in silent:
            writer.close()
        serving.close()


async def test_what_is_no_request_for_the_metrics_is_refused() -> None:
    serving = of_report()
    url = await serving.start("127.0.0.1:0")
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url.replace("/metrics", "/x"))).status_code == 404
            assert (await client.post(url)).status_code == 405
        port = int(url.removesuffix("/metrics").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * (2 * MAX_HEAD_BYTES))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    finally:
        serving.close()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
async def test_metrics_are_served_at_addresses_of_either_kind(address: str) -> None:
    serving = of_report()
    url = await serving.start(address)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert 'pdserve_pool_node_info{node="n"} 1' in (await client.get(url)).text
    finally:
        serving.close()


def test_an_address_that_is_none_is_refused() -> None:
    for text in ("9100", "host:", "http://h:1", ":1"):
        with pytest.raises(ConfigError, match="host:port"):
            load_config(PoolNodeConfig, None, {"metrics": text})
