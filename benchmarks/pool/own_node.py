"""A pool node of the benchmark's own, and clients to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.tls.authority import make_authority, make_host_certificate
from pdserve.tls.contexts import TlsConfig

TIMEOUTS: Final = {"connect_timeout_s": 10.0, "get_timeout_s": 60.0, "put_timeout_s": 60.0}

BenchPath: TypeAlias = DataPathChoice | Literal["tcp-tls"]
Connect = Callable[[BenchPath, bool], AbstractContextManager[PoolClient]]


@contextmanager
def bench_node(capacity: str, slab_bytes: int) -> Iterator[Connect]:
    """A node in a temporary directory, and one more with certificates, each started when it is first needed;
    yields `connect(path, checksum)`, where "tcp-tls" is TCP with TLS. Raises BenchError.
    """
    settings = {"capacity_bytes": capacity, "slab_bytes": slab_bytes, "keep": False}
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory, ExitStack() as stack:

        @cache
        def started(tls: TlsConfig) -> NodeProcess:
            place = Path(tempfile.mkdtemp(dir=directory))
            (node,) = stack.enter_context(pool_of(1, place, {**settings, **tls_lines(tls)}))
            running.append(node)
            return node

        @cache
        def certificates() -> TlsConfig:
            return certificates_in(Path(directory) / "ca")

        def connect(path: BenchPath, checksum: bool) -> AbstractContextManager[PoolClient]:
            if path == "tcp-tls":
                return _client(started(certificates()), "tcp", checksum, certificates())
            return _client(started(TlsConfig()), path, checksum, TlsConfig())

        running: list[NodeProcess] = []
        yield connect
        for node in running:
            node.stop()


def certificates_in(place: Path) -> TlsConfig:
    """Of a new authority, for this host."""
    ca = make_authority(place, lifetime_days=1)
    certificate, key = make_host_certificate(place, ["127.0.0.1"], lifetime_days=1)
    return TlsConfig(certificate=certificate, key=key, ca=ca)


def tls_lines(tls: TlsConfig) -> dict[str, Any]:
    """For a configuration file."""
    files = {"certificate": tls.certificate, "key": tls.key, "ca": tls.ca}
    return {"tls": {name: str(file) for name, file in files.items()}} if tls.as_server else {}


@contextmanager
def _client(node: NodeProcess, path: DataPathChoice, checksum: bool, tls: TlsConfig) -> Iterator[PoolClient]:
    config = client_of([node], path, checksum=checksum, tls=tls, **TIMEOUTS)
    with closing(PoolClient(config, "bench", {"bench": "1"}, name="bench")) as client:
        if (problem := client.check()[node.name]) is not None:
            raise BenchError(str(problem)) from problem
        yield client
        client.clear()
