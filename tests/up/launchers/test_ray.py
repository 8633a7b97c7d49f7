"""An actor of Ray that is lost. The contract of launchers has the rest."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.up.cluster import running, wait_until
from tests.support.up.ray_cluster import ray_cluster

pytestmark = [pytest.mark.timeout(400), pytest.mark.long, pytest.mark.extended]

FILE = """
[cluster]
name = "stand-in"
[router]
[[agg]]
engine = { behave = "parent", journal = "JOURNAL" }
"""


def test_a_worker_whose_actor_is_killed_ends_and_starts_again(tmp_path: Path) -> None:
    """As Ray's memory monitor does. The first worker and its child ignore SIGTERM."""
    with (
        ray_cluster(tmp_path) as variables,
        running(tmp_path, FILE, on="ray", variables=variables) as cluster,
    ):
        cluster.wait_for("stand-in is ready at")
        worker = psutil.Process(cluster.started()["agg"])
        left = [worker, *worker.children()]
        assert len(left) == 2
        actor = next(one for one in worker.parents() if one.name().startswith("ray::"))
        actor.kill()
        cluster.wait_for("error: agg0 ")
        cluster.wait_for("agg0 is ready after")
        wait_until(lambda: not any(one.is_running() for one in left), "the first worker has ended")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0
