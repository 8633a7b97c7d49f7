"""The bytes of tests/e2e/test_hostile.py, to a pool node and a router that have certificates: before the
handshake, and inside TLS, which everybody may begin.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.settings.toml_text import to_toml
from pdserve.tls.contexts import Certificates
from tests.support.certificates import Authority
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, soon
from tests.support.netns.visitor import ATTACKS, Visitor
from tests.support.processes import free_ports

TOKEN = "the-token-of-this-pools-operator"
LOOP = "127.0.0.1"
MOST_GROWTH = 1.2
CONNECTIONS = 20
STARTS_WITHIN_S = 60.0


class Site:
    """A pool node and a router, with one authority's certificates."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.authority = Authority(directory / "ca")
        self.certificate, self.key = self.authority.files(LOOP)
        self.ports = self.control, self.pages, self.router = free_ports(3)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start("node", ("pool", "serve"), self._node(), "is ready")
        self._start("router", ("router",), self._router(), "listening on")

    def _node(self) -> dict[str, Any]:
        return {
            "name": "node",
            "listen": [f"tcp:{LOOP}:{self.control}"],
            "arena_dir": str(self._directory / "arena"),
            "capacity_bytes": "16MiB",
            "slab_bytes": "1MiB",
            "admin_token": TOKEN,
            "tcp": {"port": self.pages},
            "tls": {
                "certificate": str(self.certificate),
                "key": str(self.key),
                "ca": str(self.authority.ca),
            },
        }

    def _router(self) -> dict[str, Any]:
        keys_file = self._directory / "keys"
        subprocess.run(
            [sys.executable, "-m", "pdserve", "key", "acme", "--file", str(keys_file)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return {
            "host": LOOP,
            "port": self.router,
            "decode": [f"http://{LOOP}:9"],
            "access": {
                "keys_file": str(keys_file),
                "tls_cert_file": str(self.certificate),
                "tls_key_file": str(self.key),
            },
        }

    def _start(self, name: str, command: tuple[str, ...], config: dict[str, Any], says: str) -> None:
        file, log = self._directory / f"{name}.toml", self._directory / f"{name}.log"
        file.write_text(to_toml(config))
        whole = [sys.executable, "-m", "pdserve", *command, "--config", str(file)]
        with log.open("wb") as out:
            self.processes[name] = subprocess.Popen(whole, stdout=out, stderr=out)
        deadline_s = soon(STARTS_WITHIN_S)
        while says not in log.read_text():
            assert self.processes[name].poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)  # between looks

    def memory_bytes(self) -> dict[str, int]:
        return {name: psutil.Process(one.pid).memory_info().rss for name, one in self.processes.items()}

    def assert_serves(self, seed: int) -> None:
        """Pages by TLS at the node, an answer by TLS at the router."""
        context = Certificates(self.authority.client()).client_context
        honest = connect(f"tcp:{LOOP}:{self.control}", soon(), "tcp", token=TOKEN, tls=context)
        try:
            namespace, some = open_namespace(honest, "honest"), keys(2, seed)
            put(honest, namespace, some)
            assert get(honest, namespace, some) == some
        finally:
            honest.close()
        trusting = ssl.create_default_context(cafile=str(self.authority.ca))
        asked = http.client.HTTPSConnection(LOOP, self.router, timeout=20, context=trusting)
        with contextlib.closing(asked):
            asked.request("GET", "/health")
            assert asked.getresponse().status == 200

    def close(self) -> None:
        for name, process in self.processes.items():
            alive = process.poll() is None
            process.kill()
            process.wait()
            log = (self._directory / f"{name}.log").read_text()
            assert alive, log
            assert "Traceback" not in log
            assert TOKEN not in log


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        made.assert_serves(0)
        warmed_up = Visitor(LOOP)  # TLS keeps buffers for each connection, and the heap keeps their place
        for port in (made.control, made.router):
            warmed_up.attack(port, "noise", CONNECTIONS, inside_tls=True)
        warmed_up.let_go()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("inside_tls", [False, True], ids=["before TLS", "inside TLS"])
@pytest.mark.parametrize("kind", ATTACKS)
def test_bytes_of_strangers_harm_nobody(site: Site, kind: str, inside_tls: bool) -> None:
    before, visitor = site.memory_bytes(), Visitor(LOOP)
    try:
        for port in site.ports:
            # at the port of pages nobody gets inside without a ticket
            visitor.attack(port, kind, CONNECTIONS, inside_tls=inside_tls and port != site.pages)
        site.assert_serves(1)
        grown = {name: size / before[name] for name, size in site.memory_bytes().items()}
        assert max(grown.values()) <= MOST_GROWTH, grown
    finally:
        visitor.let_go()
    site.assert_serves(2)
