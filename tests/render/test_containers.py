"""The containers of rendered files run as they are written: commands, probes and stop hooks, with the
volumes, names, user and read-only root that Kubernetes would give them. Pool nodes and the router are real.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.support.kubernetes.pods import Pod
from tests.support.kubernetes.stage import Stage, secret, staged, until
from tests.support.router.mock_worker import MockWorker

ROOT: Final = Path(__file__).parents[2]
FILE: Final = """
[cluster]
name = "contract"

[router]
access = { keys_file = "keys" }
stop_grace_s = 5.0

[worker.engine]
model_path = "/models/m"

[[pool]]
capacity_bytes = "64MiB"
slab_bytes = "4MiB"
numa_node = 0

[[pool]]
capacity_bytes = "64MiB"
slab_bytes = "4MiB"
numa_node = 0

[[decode]]
"""
POOL, WORKER, ROUTER = "contract-pool", "contract-decode", "contract-router"
PAGES: Final = 64


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path, FILE) as made:
        yield made


def test_pool_nodes_start_find_each_other_and_hand_their_pages_over_before_they_end(stage: Stage) -> None:
    nodes = [stage.pod(f"{POOL}-{i}") for i in range(2)]
    worker = stage.pod(f"{WORKER}-0")
    worker.start(stage.hosts, "sleep", "300")
    for node in nodes:
        node.start(stage.hosts)
    for node in nodes:
        node.await_started()
        assert node.probe("livenessProbe")
    until(lambda: shows_metrics(stage, nodes[0]), nodes[0])

    assert count_of(worker, "keep") == PAGES
    ended = nodes[0].stop()
    assert (ended.hook, ended.status) == (0, 0), nodes[0].log()
    assert ended.took_s < nodes[0].spec["terminationGracePeriodSeconds"]
    assert count_of(worker, "check") == PAGES
    last = nodes[1].stop()
    assert (last.hook, last.status) == (1, 0), "nobody is left to take its pages, and it ends all the same"


def shows_metrics(stage: Stage, pod: Pod) -> bool:
    try:
        return stage.ask(pod, "/metrics", port="metrics").status == 200
    except ConnectionError:  # it opens after the control port
        return False


def count_of(worker: Pod, what: str) -> int:
    """Pages that the worker's container stored or read."""
    command = [
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-m",
        "tests.support.kubernetes.pages",
        what,
        str(PAGES),
    ]
    done = worker.run(command, 60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_router_finds_workers_by_their_pods_and_ends_without_losing_a_request(stage: Stage) -> None:
    mock, worker, router = MockWorker("decode"), stage.pod(f"{WORKER}-0"), stage.pod(f"{ROUTER}-x")
    mock.token = secret("cluster-token")
    loop = stage.loop_on(worker.name)
    loop.run(mock.start(worker.ports["http"], "0.0.0.0"))
    stage.start_api()
    try:
        router.start(stage.hosts)
        until(lambda: router.probe("startupProbe"), router)
        assert not router.probe("readinessProbe"), "it has no worker yet"
        assert router.probe("livenessProbe")
        assert stage.reaches(router, worker, "http")
        assert not stage.reaches(stage.pod(f"{POOL}-0"), worker, "http"), "a policy is against it"
        stage.show(worker)
        router.await_started()
        assert answers(stage, router, "") == 401
        assert answers(stage, router, stage.key) == 200
        with ThreadPoolExecutor(1) as kubelet:
            ending = kubelet.submit(router.stop)
            assert answers(stage, router, stage.key) == 200, "services still name a pod that is to end"
            assert ending.result()[:2] == (0, 0), router.log()
    finally:
        loop.run(mock.stop())


def answers(stage: Stage, router: Pod, key: str) -> int:
    """Status of a request of somebody with this key."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return stage.ask(router, "/v1/chat/completions", key, body).status
