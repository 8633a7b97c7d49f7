"""The containers of rendered files run as they are written: commands, probes and stop hooks, with the
volumes, names, user and read-only root that Kubernetes would give them. Pool nodes and the router are real.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from pdserve.render.cli import app
from tests.support.certificates import Authority
from tests.support.command import pdserve_here
from tests.support.kubernetes.api_server import NAMESPACE, TOKEN, ApiServer
from tests.support.kubernetes.pods import NODE, Pod, Rendered, ask
from tests.support.netns.lab import Lab, lab
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

[[pool]]
capacity_bytes = "64MiB"
slab_bytes = "4MiB"

[[decode]]
"""
POOL, WORKER, ROUTER = "contract-pool", "contract-decode", "contract-router"
PODS: Final = {f"{POOL}-0": POOL, f"{POOL}-1": POOL, f"{WORKER}-0": WORKER, f"{ROUTER}-x": ROUTER}
"""Workload by pod."""
PAGES: Final = 64
API_PORT: Final = 6443
HANGS_S: Final = 60.0
"""No bound of the product's: after it a test is taken to hang."""


class Stage:
    """Where pods are started."""

    def __init__(self, directory: Path, network: Lab) -> None:
        (directory / "cluster.toml").write_text(FILE)
        words = ["kubernetes", str(directory / "cluster.toml"), "--out", str(directory / "k8s")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        secrets = directory / "secrets"
        secrets.mkdir()
        self.key = pdserve_here("key", "acme", "--file", str(secrets / "keys")).stdout.split()[-1]
        for name in ("admin-key", "cluster-token", "pool-admin-token", "pool-cluster-token", "pool-token"):
            (secrets / name).write_text(f"the-{name}-of-this-test\n")
        self.authority = Authority(directory)
        self._account(directory / "account")
        (directory / "models").mkdir()
        self.network = network
        self.rendered = Rendered.read(directory / "k8s", secrets)
        self.hosts = {
            f"{pod}.{workload}": network.address(pod) for pod, workload in PODS.items() if workload != ROUTER
        }
        self._directory = directory
        self._stack = ExitStack()

    def _account(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "token").write_text(TOKEN)
        (directory / "namespace").write_text(NAMESPACE)
        (directory / "ca.crt").write_bytes(self.authority.ca.read_bytes())

    def pod(self, name: str) -> Pod:
        """Not started yet."""
        api = {
            "KUBERNETES_SERVICE_HOST": self.network.address(NODE),
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
        }
        made = Pod(self.rendered, PODS[name], name, self.network, self._directory, **api)
        self._stack.callback(made.kill)
        return made

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with lab(NODE, *PODS) as network:
        made = Stage(tmp_path, network)
        try:
            yield made
        finally:
            made.close()


class LoopOn:
    """An event loop on a host of the network."""

    def __init__(self, network: Lab, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, args=(network, host), daemon=True)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(20)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _turn(self, network: Lab, host: str) -> None:
        network.enter(host)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


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
    def asked() -> bool:
        try:
            return ask(pod.address, pod.ports["metrics"], "/metrics")[0] == 200
        except ConnectionError:  # it opens after the control port
            return False

    return stage.network.call(NODE, asked)


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
    loops = {host: LoopOn(stage.network, host) for host in (NODE, f"{WORKER}-0")}
    api, mock, worker = ApiServer(), MockWorker("decode"), stage.pod(f"{WORKER}-0")
    certificate, key = stage.authority.files(stage.network.address(NODE))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    api.port = API_PORT
    mock.token = "the-cluster-token-of-this-test"
    router = stage.pod(f"{ROUTER}-x")
    try:
        loops[NODE].run(api.start("0.0.0.0", tls))
        loops[f"{WORKER}-0"].run(mock.start(worker.ports["http"], "0.0.0.0"))
        router.start(stage.hosts)
        until(lambda: router.probe("startupProbe"), router)
        assert not router.probe("readinessProbe"), "it has no worker yet"
        assert router.probe("livenessProbe")

        async def join() -> None:
            api.put(worker.as_object())

        loops[NODE].run(join())
        router.await_started()
        assert answers(stage, router, "") == 401
        assert answers(stage, router, stage.key) == 200
        with ThreadPoolExecutor(1) as kubelet:
            ending = kubelet.submit(router.stop)
            assert answers(stage, router, stage.key) == 200, "services still name a pod that is to end"
            assert ending.result()[:2] == (0, 0), router.log()
    finally:
        loops[NODE].run(api.stop())
        loops[f"{WORKER}-0"].run(mock.stop())
        for loop in loops.values():
            loop.close()


def answers(stage: Stage, router: Pod, key: str) -> int:
    """Status of a request of somebody with this key."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}

    def asked() -> int:
        return ask(router.address, router.ports["http"], "/v1/chat/completions", key, body)[0]

    return stage.network.call(NODE, asked)


def until(holds: Callable[[], bool], pod: Pod) -> None:
    deadline_s = time.monotonic() + HANGS_S
    while not holds():
        assert pod.runs, pod.log()
        assert time.monotonic() < deadline_s, pod.log()
        time.sleep(0.1)
