"""Dashboards and the script that starts what shows them: every query against live metrics."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from docs.generate.product import LISTED
from pdserve.engine.http.timing import FirstToken, WorkerMetrics
from pdserve.kvpool.client.operations import ClientCounters
from pdserve.kvpool.mover.client_metrics import ClientMetrics
from pdserve.router.config.limits import ServiceLevel
from pdserve.up.config import ClusterFile
from pdserve.up.plan import make_plan
from pdserve.up.scraping import TARGETS_FILE, targets
from tests.support.certificate import certificate
from tests.support.e2e.cluster import PoolNode, free_port
from tests.support.router.harness import disagg
from tests.support.up.scripts import LAUNCH, program

TARGET_LABELS = {"instance", "job", "process", "le"}
GROUPED = re.compile(r"\b(?:by|without|on|ignoring) \(([^)]*)\)")
SELECTED = re.compile(r"\b(pdserve_\w+)(?:{([^}]*)})?")


def queries() -> Iterator[tuple[str, str, str]]:
    """(dashboard, panel, expression), Grafana's interval filled in."""
    for path in sorted((LAUNCH / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield path.stem, panel["title"], target["expr"].replace("$__rate_interval", "1m")


def unknown(expression: str, labels_of: dict[str, set[str]]) -> set[str]:
    """Metrics and labels that an expression names and that are not there."""
    found: set[str] = set()
    known: set[str] = set(TARGET_LABELS)
    for metric, selectors in SELECTED.findall(expression):
        if metric not in labels_of:
            found.add(metric)
            continue
        known |= labels_of[metric]
        chosen = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors)
        found |= set(chosen) - labels_of[metric] - TARGET_LABELS
    grouped = {label.strip() for labels in GROUPED.findall(expression) for label in labels.split(",")}
    return found | (grouped - known - {""})


def listed() -> dict[str, set[str]]:
    """Series names and their labels, of the tables that other tests compare with what is live."""
    found = {}
    for one in LISTED:
        names = [one.full_name]
        if one.kind == "histogram":
            names = [one.full_name + end for end in ("_bucket", "_sum", "_count")]
        found.update({name: set(one.labels) for name in names})
    return found


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ('sum by (part) (rate(pdserve_router_first_token_seconds_sum{part="pull"}[1m]))', set()),
        ("sum(rate(pdserve_router_first_tokens_sum[1m]))", {"pdserve_router_first_tokens_sum"}),
        ('pdserve_pool_hits_total{name="a"}', {"name"}),
        ("sum by (tenant) (pdserve_pool_hits_total)", {"tenant"}),
    ],
)
def test_the_check_finds_what_is_not_there(expression: str, missing: set[str]) -> None:
    assert unknown(expression, listed()) == missing


def test_every_query_names_metrics_and_labels_that_are_listed() -> None:
    live = listed()
    assert len(live) > 50
    assert {(board, panel): missing for board, panel, e in queries() if (missing := unknown(e, live))} == {}


@pytest.mark.extended
def test_every_query_parses(tmp_path: Path) -> None:
    rules = [{"record": f"q{i}", "expr": expression} for i, (_, _, expression) in enumerate(queries())]
    assert len(rules) > 50
    file = tmp_path / "rules.json"  # JSON is YAML
    for wrong in (False, True):
        more = [{"record": "wrong", "expr": "sum(rate(x[1m])"}] if wrong else []
        file.write_text(json.dumps({"groups": [{"name": "g", "rules": rules + more}]}))
        checked = subprocess.run(
            ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=120
        )
        assert (checked.returncode != 0) is wrong, checked.stderr


def test_a_clusters_targets_are_its_processes_with_metrics() -> None:
    file = ClusterFile(
        pool=[{}, {"metrics": "0.0.0.0:9100"}, {"metrics": ""}], agg=[{}], router={"port": 8000}
    )
    plan = make_plan(file, program=("x",), run_dir=Path("/r"), uid=0, ports=iter(range(7000, 7010)))
    assert [(one["targets"], one["labels"]) for one in targets(plan)] == [
        (["127.0.0.1:7001"], {"job": "pool", "process": "pool0"}),
        (["127.0.0.1:9100"], {"job": "pool", "process": "pool1"}),
        (["127.0.0.1:7000"], {"job": "worker", "process": "agg0"}),
        (["127.0.0.1:8000"], {"job": "router", "process": "router"}),
    ]


def worker_registry() -> CollectorRegistry:
    """What a worker adds to SGLang's metrics, counted by the same objects."""
    worker, client = WorkerMetrics(), ClientMetrics()
    worker.count(FirstToken({"queue": 0.1, "pull": 0.2, "compute": 0.3}), {"device": 1, "computed": 9})
    client.publish(ClientCounters(pages_read=3, bytes_read=300))
    with client.timed("read"):
        pass

    class All(Collector):
        def collect(self) -> Iterator[Any]:
            yield from worker._seconds.collect()
            yield from worker._tokens.collect()
            yield from client._registry.collect()

    registry = CollectorRegistry()
    registry.register(All())
    return registry


class Api:
    """Prometheus' HTTP API."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, what: str, **asked: str) -> Any:
        url = f"{self._base}{what}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def all_up(self, count: int) -> bool:
        try:
            active = self.get("targets", state="active")["activeTargets"]
        except OSError:
            return False
        return [one["health"] for one in active] == ["up"] * count


@pytest.fixture
def monitoring(tmp_path: Path) -> Iterator[Callable[[], Api]]:
    """Starts the script, its Prometheus a quick one."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Api:
        quick = 'for word; do case $word in --config.file=*) sed -i "s/ 5s/ 200ms/" "${word#*=}"; esac; done'
        program(tmp_path / "bin/prometheus", f'{quick}; exec {shutil.which("prometheus")} "$@"')
        port = free_port()
        words = ["--port", str(port), "--data", str(tmp_path / "data"), str(tmp_path)]
        path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        started.append(subprocess.Popen([str(LAUNCH / "monitoring.sh"), *words], env=os.environ | path))
        return Api(port)

    yield start
    for script in started:
        script.terminate()
        assert script.wait(30) == 0


@pytest.mark.extended
@pytest.mark.timeout(200)
async def test_every_query_finds_its_metrics_and_labels_in_a_live_prometheus(
    tmp_path: Path, monitoring: Callable[[], Api]
) -> None:
    """One of the two routers speaks TLS; its certificate does not name the host that is scraped."""
    pool_port = free_port()
    pool = PoolNode(tmp_path, capacity="16MiB", extra={"metrics": f"127.0.0.1:{pool_port}"}).start()
    cert, key = map(str, certificate(tmp_path))
    worker, _ = start_http_server(0, "127.0.0.1", worker_registry())
    secure, _ = start_http_server(0, "127.0.0.1", worker_registry(), certfile=cert, keyfile=key)
    try:
        async with disagg(slo=ServiceLevel(ttft_ms=1000.0)) as (harness, _, _):
            await harness.chat(stream=True, user="u")
            places = [("router", harness.port), ("worker", worker.server_port), ("pool", pool_port)]
            found = [
                {"targets": [f"127.0.0.1:{port}"], "labels": {"job": job, "process": job}}
                for job, port in places
            ]
            labels = {"job": "router", "process": "secure", "__scheme__": "https"}
            found.append({"targets": [f"localhost:{secure.server_port}"], "labels": labels})
            (tmp_path / TARGETS_FILE).write_text(json.dumps(found))
            api = monitoring()
            while not await asyncio.to_thread(api.all_up, len(found)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
            await asyncio.to_thread(check, api)
    finally:
        worker.shutdown()
        secure.shutdown()
        pool.stop()


def check(api: Api) -> None:
    """Every query is answered, and names nothing that is not there."""
    live = listed()
    for metric in live:
        labels = {label for series in api.get("series", **{"match[]": metric}) for label in series}
        if labels:
            live[metric] = labels - {"__name__"}
    wrong = {(board, panel): missing for board, panel, e in queries() if (missing := unknown(e, live))}
    assert wrong == {}
    names = set(api.get("label/__name__/values"))
    used = {metric for _, _, e in queries() for metric, _ in SELECTED.findall(e)}
    quiet = {"pdserve_router_stream_errors_total", "pdserve_router_client_aborts_total"}
    quiet |= {"pdserve_router_decode_retries_total", "pdserve_router_settle_total"}
    quiet |= {"pdserve_pool_quota_bytes", "pdserve_router_queue_wait_seconds_bucket"}
    of_spaces = {name for name in used if re.match(r"pdserve_pool_(?!client)", name)}
    assert used - names - quiet - of_spaces == set()
    assert "pdserve_pool_memory_bytes" in names
    for _, _, expression in queries():
        api.get("query", query=expression)


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "realpath"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    said = subprocess.run(
        [str(LAUNCH / "monitoring.sh")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 1
    assert "apt-get install prometheus" in said.stderr


def test_grafana_is_looked_for_where_only_root_looks(tmp_path: Path) -> None:
    path = tmp_path / "bin/prometheus"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$PATH" >{tmp_path}/path\n')
    path.chmod(0o755)
    subprocess.run(
        [str(LAUNCH / "monitoring.sh"), "--data", str(tmp_path / "data")],
        env={**os.environ, "PATH": f"{path.parent}:/usr/bin:/bin"},
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "path").read_text().strip().endswith(":/usr/sbin:/sbin")
