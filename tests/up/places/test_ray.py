"""A node of Ray that is lost. The contract of places has the rest."""

from __future__ import annotations

import os
import signal
import tomllib
from pathlib import Path

import pytest

from tests.support.up.cluster import running
from tests.support.up.ray_cluster import ray_cluster, ray_node

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

FILE = """
[cluster]
name = "stand-in"
restart_backoff_s = 0.05
[router]
[[agg]]
count = 6
"""


def test_workers_of_a_lost_node_start_again_on_others(tmp_path: Path) -> None:
    with (
        ray_cluster(tmp_path) as variables,
        ray_node(variables["RAY_ADDRESS"], tmp_path) as node,
        running(tmp_path, FILE, on="ray", variables=variables) as cluster,
    ):
        cluster.wait_for("stand-in is ready at")
        before = tomllib.loads((cluster.run_dir / "router.toml").read_text())["agg"]
        os.killpg(node.pid, signal.SIGKILL)
        cluster.wait_for(r"moving (\w+(, )?)+ to another host: done")
        after = tomllib.loads((cluster.run_dir / "router.toml").read_text())["agg"]
        assert len(after) == len(before) == 6
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0
