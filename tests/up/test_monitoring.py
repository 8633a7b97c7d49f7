"""Dashboards and the script that starts what shows them: every query against live metrics."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.product import LISTED
from pdserve.up.config import ClusterFile
from pdserve.up.plan import make_plan
from pdserve.up.supervisor import TARGETS_FILE, targets
from tests.support.up.scripts import LAUNCH

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


def test_prometheus_finds_the_targets_of_every_cluster() -> None:
    config = (LAUNCH / "grafana/prometheus.yml").read_text()
    assert f"/logs/*/{TARGETS_FILE}" in config
