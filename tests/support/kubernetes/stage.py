"""Where the pods of a rendered cluster file are started: a network with a host for each of them, and one for
the kubelet, which also has the API server and the clients.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from pdserve.render.cli import app
from tests.support.certificates import Authority
from tests.support.command import pdserve_here
from tests.support.kubernetes.api_server import NAMESPACE, TOKEN, ApiServer
from tests.support.kubernetes.pods import NODE, Json, Pod, Rendered, Said, ask
from tests.support.kubernetes.policies import rules
from tests.support.netns.lab import Lab, lab

SECRETS: Final = ("admin-key", "cluster-token", "pool-admin-token", "pool-cluster-token", "pool-token")
API_PORT: Final = 6443
DROPPED_S: Final = 3.0
"""No packet between these hosts takes as long."""
HANGS_S: Final = 60.0
"""No bound of the product's: after it a test is taken to hang."""


class Stage:
    """Its pods are not started. They end with it."""

    def __init__(self, directory: Path, rendered: Rendered, key: str, network: Lab) -> None:
        self.key, self.network, self.rendered = key, network, rendered
        self.authority = Authority(directory)
        self.api = ApiServer()
        self.api.port = API_PORT
        self._directory = directory
        self._stack = ExitStack()
        account = directory / "account"
        account.mkdir()
        (account / "token").write_text(TOKEN)
        (account / "namespace").write_text(NAMESPACE)
        (account / "ca.crt").write_bytes(self.authority.ca.read_bytes())
        named = {pod: rendered.service(workload) for pod, workload in rendered.pods.items()}
        self.hosts = {f"{pod}.{service}": network.address(pod) for pod, service in named.items() if service}
        """Addresses by the names that headless services give."""

    def pod(self, name: str) -> Pod:
        """Not started yet."""
        api = {
            "KUBERNETES_SERVICE_HOST": self.network.address(NODE),
            "KUBERNETES_SERVICE_PORT": str(API_PORT),
        }
        made = Pod(self.rendered, self.rendered.pods[name], name, self.network, self._directory, **api)
        self._stack.callback(made.kill)
        return made

    def loop_on(self, host: str) -> LoopOn:
        """Stopped with the stage."""
        loop = LoopOn(self.network, host)
        self._stack.callback(loop.close)
        return loop

    def start_api(self) -> None:
        """The API server, which shows no pod yet."""
        self._api_loop = self.loop_on(NODE)
        certificate, key = self.authority.files(self.network.address(NODE))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        self._api_loop.run(self.api.start("0.0.0.0", tls))
        self._stack.callback(lambda: self._api_loop.run(self.api.stop()))

    def show(self, *pods: Pod) -> None:
        """The API server shows that they run."""

        async def put() -> None:
            for pod in pods:
                self.api.put(pod.as_object())

        self._api_loop.run(put())

    def ask(self, pod: Pod, path: str, key: str = "", body: Json | None = None, port: str = "http") -> Said:
        """What the pod says to somebody on the kubelet's host. `port`: by its name."""
        return self.network.call(NODE, lambda: ask(pod.address, pod.ports[port], path, key, body))

    def reaches(self, pod: Pod, other: Pod, port: str) -> bool:
        """Whether a connection from the pod to a port of the other, by its name, is opened at once."""

        def tried() -> bool:
            try:
                socket.create_connection((other.address, other.ports[port]), DROPPED_S).close()
            except TimeoutError:
                return False
            return True

        return self.network.call(pod.name, tried)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def staged(directory: Path, cluster_file: str, models: Path | None = None) -> Iterator[Stage]:
    """Renders as a user does, with secrets of this test's. `models`: what the volume of models holds."""
    (directory / "cluster.toml").write_text(cluster_file)
    words = ["kubernetes", str(directory / "cluster.toml"), "--out", str(directory / "k8s")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    secrets = directory / "secrets"
    secrets.mkdir()
    key = pdserve_here("key", "acme", "--file", str(secrets / "keys")).stdout.split()[-1]
    for name in SECRETS:
        (secrets / name).write_text(f"{secret(name)}\n")
    if models is None:
        (directory / "models").mkdir()
    else:
        shutil.copytree(models, directory / "models")
    rendered = Rendered.read(directory / "k8s", secrets)
    with lab(NODE, *rendered.pods) as network:
        addresses = {pod: network.address(pod) for pod in rendered.pods}
        labels = {
            pod: rendered.template(workload)["metadata"]["labels"] for pod, workload in rendered.pods.items()
        }
        network.filter(rules(rendered.all("NetworkPolicy"), labels, addresses, network.address(NODE)))
        made = Stage(directory, rendered, key, network)
        try:
            yield made
        finally:
            made.close()


def secret(name: str) -> str:
    """What the file of this name in the Secret says."""
    return f"the-{name}-of-this-test"


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


def until(holds: Callable[[], bool], pod: Pod) -> None:
    """Wait while the pod runs."""
    deadline_s = time.monotonic() + HANGS_S
    while not holds():
        assert pod.runs, pod.log()
        assert time.monotonic() < deadline_s, pod.log()
        time.sleep(0.1)
