"""What the doctor finds out of LMCache servers, and what it makes of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.doctor import lmcache
from pdserve.doctor.cli import _lmcache
from pdserve.settings.toml_text import to_toml
from pdserve.up.config import read_cluster_file
from pdserve.up.plan import make_plan

OURS = {"type": "pdserve", "is_healthy": True, "nodes_up": 2, "namespaces": {"lmcache-m@1": {}}}


@pytest.mark.parametrize(
    ("adapters", "level", "says"),
    [
        ([OURS], "ok", "reaches 2 pool nodes"),
        ([OURS | {"nodes_up": 0}], "fail", "reaches no pool node"),
        ([OURS | {"nodes_up": 0, "namespaces": {}}], "ok", "has had no page"),
        ([{"type": "fs_native", "is_healthy": True}], "ok", "out of the pool"),
        ([], "ok", "out of the pool"),
    ],
)
def test_a_server_says_whether_it_reaches_the_pool(
    adapters: list[dict[str, Any]], level: str, says: str
) -> None:
    said = json.dumps(
        {"is_healthy": True, "storage_manager": {"l2_adapters": adapters, "num_l2_adapters": 1}}
    )
    found = lmcache.judge(
        "lmcache0", msgspec.json.decode(said, type=lmcache.Status).storage_manager.l2_adapters
    )
    assert (found.check, found.level) == ("LMCache", level)
    assert found.says.startswith("lmcache0 ")
    assert says in found.says


def test_servers_are_found_by_the_configuration_that_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    model = {"model_path": str(tmp_path)}
    file.write_text(to_toml({"lmcache": [{}, {}], "pool": [{}], "vllm": [model]}))
    cluster = read_cluster_file(file, {}, {})
    plan = make_plan(cluster, program=("pdserve",), run_dir=tmp_path, uid=0, ports=itertools.count(1))
    assert _lmcache(plan) == {}
    (tmp_path / "lmcache1.toml").write_text(to_toml({"host": "127.0.0.1", "http_port": 4711}))
    assert _lmcache(plan) == {"lmcache1": "http://127.0.0.1:4711"}
