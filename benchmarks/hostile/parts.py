"""What is attacked: a pool node, one with TLS, and a router. Each asks for tokens or keys."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from msgspec.structs import replace

from benchmarks.hostile.attacks import GEOMETRY, HOST, NAMESPACE, PAGE_BYTES, Port, Secrets
from benchmarks.hostile.honest import Phase, chat_phase, pool_client, pool_phase
from benchmarks.node_processes import pool_of
from benchmarks.pool.load_process import fill, make_keys
from benchmarks.pool.own_node import certificates_in, tls_lines
from benchmarks.processes import free_ports, server
from benchmarks.router.contenders import mock_worker
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.router.tenants.api_keys import key_line
from pdserve.settings.toml_text import to_toml
from pdserve.tls.contexts import TlsConfig
from pdserve.tokens import Secret

PAGES: Final = 256
HONEST: Final = "the-secret-of-the-honest-client"
HOSTILE: Final = Secrets(
    read_token="the-read-token-of-the-hostile-one",
    write_token="the-write-token-of-the-hostile-one",
    api_key="the-key-of-the-hostile-tenant",
)
NODE: Final = {
    "capacity_bytes": 256 << 20,
    "slab_bytes": 4 << 20,
    "keep": False,
    "admin_token": "the-token-of-the-operator",
    "namespace_defaults": {"read_token": HONEST},
    "namespaces": [
        {
            "name": NAMESPACE,
            "quota_bytes": 64 << 20,
            "read_token": HOSTILE.read_token,
            "write_token": HOSTILE.write_token,
        }
    ],
}
CONCURRENCY: Final = 64  # of the hostile tenant


class Part(NamedTuple):
    """One process, its ports, and what honest clients ask of it."""

    ports: Mapping[Port, int]
    process: psutil.Process
    phase: Phase
    runs: Callable[[], bool]

    def memory_bytes(self) -> int:
        """Its own, without what it shares, such as a node's pages. 0 where it has ended."""
        try:
            found = self.process.memory_info()
        except psutil.NoSuchProcess:
            return 0
        return int(found.rss - found.shared)


@contextmanager
def pool_part(directory: Path, tls: TlsConfig) -> Iterator[Part]:
    """A pool node. Raises BenchError."""
    control, pages = free_ports(2)
    settings = {**NODE, "tcp": {"port": pages}, **tls_lines(tls)}
    with pool_of(1, directory, settings, [control]) as (node,):
        config = PoolClientConfig(
            nodes=[PoolNodeRef(node=node.name, address=f"tcp:{HOST}:{control}")],
            data_path="tcp",
            token=Secret(HONEST),
            tls=TlsConfig(ca=tls.ca),
        )
        keys = make_keys("hostile", PAGES)
        with closing(pool_client(config)) as client:
            fill(client, keys, PAGE_BYTES)
        theirs = replace(config, token=Secret(HOSTILE.write_token))
        with closing(PoolClient(theirs, NAMESPACE, GEOMETRY, name="hostile")) as client:
            fill(client, keys[:1], PAGE_BYTES)  # who only reads cannot make it
        ports: dict[Port, int]
        if tls.as_server:
            ports = {"pool: control, TLS": control, "pool: pages, TLS": pages}
        else:
            ports = {"pool: control": control, "pool: pages": pages}
        yield Part(ports, psutil.Process(node.pid), pool_phase(config, keys), lambda: node.runs)


@contextmanager
def tls_pool_part(directory: Path) -> Iterator[Part]:
    """A pool node with a certificate. Raises BenchError."""
    with pool_part(directory, certificates_in(directory)) as part:
        yield part


@contextmanager
def router_part(directory: Path) -> Iterator[Part]:
    """A router with two tenants, before one worker. Raises BenchError."""
    (port,) = free_ports(1)
    keys = directory / "keys"
    keys.write_text(key_line("honest", HONEST) + key_line("hostile", HOSTILE.api_key))
    with mock_worker("agg", directory) as worker:
        config = {
            "port": port,
            "agg": [f"http://{HOST}:{worker.port}"],
            "log_level": "error",
            "access": {"keys_file": str(keys)},
            "tenants": [{"name": "hostile", "concurrency": CONCURRENCY}],
        }
        file = directory / "router.toml"
        file.write_text(to_toml(config))
        command = [sys.executable, "-m", "pdserve", "router", "--config", str(file)]
        with server("the router", command, directory / "router.log", lambda: _is_ready(port)) as made:
            phase = chat_phase(port, HONEST)
            yield Part({"router": port}, psutil.Process(made.pid), phase, lambda: made.poll() is None)


PARTS: Final = (lambda directory: pool_part(directory, TlsConfig()), tls_pool_part, router_part)


def _is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port, timeout=1.0)) as client:
        try:
            client.request("GET", "/ready")
            return client.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def check_alone(missed: int, what: str) -> None:
    """Raises BenchError where an honest client is not served although nobody attacks."""
    if missed:
        raise BenchError(
            f"{missed} times {what} was not served though nobody attacks: nothing can be measured"
        )
