"""How long a control message takes to a node and back, and a connect: by Unix socket, TCP, and TCP with TLS.

The message is the smallest there is (Ping). One client asks, one message at a time; the ways take turns. With
TLS a connect has a handshake without resumption, as each process makes it once for each node.
"""

from __future__ import annotations

import ssl
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from benchmarks.node_processes import NodeProcess, pool_of
from benchmarks.pool.own_node import certificates_in, tls_lines
from benchmarks.processes import free_ports
from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.protocol.messages import Done, Ping
from pdserve.tls.contexts import Certificates, TlsConfig

ROUNDS: Final = 10
CONNECTS: Final = 20  # in each round
SETTINGS: Final = {"capacity_bytes": 64 << 20, "slab_bytes": 4 << 20, "keep": False}


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """One way. `over_tcp`: its median over that of TCP without TLS."""

    path: str
    messages: int
    p50_us: float
    p99_us: float
    over_tcp: float
    connects: int
    connect_p50_us: float


class _Way(NamedTuple):
    address: str
    tls: ssl.SSLContext | None
    messages_s: list[float]
    connects_s: list[float]


def round_trips(seconds: float, directory: Path) -> Iterator[RoundTrip]:
    """Each way for about so many seconds. Raises BenchError."""
    tls = certificates_in(directory / "ca")
    plain_port, tls_port = free_ports(2)
    with ExitStack() as stack:

        def node(place: str, settings: Mapping[str, object], port: int) -> NodeProcess:
            (directory / place).mkdir()
            (started,) = stack.enter_context(pool_of(1, directory / place, settings, [port]))
            return started

        plain = node("plain", SETTINGS, plain_port)
        node("tls", {**SETTINGS, **tls_lines(tls)}, tls_port)
        context = Certificates(TlsConfig(ca=tls.ca)).client_context
        ways = {
            "unix": _Way(plain.address, None, [], []),
            "tcp": _Way(f"tcp:127.0.0.1:{plain_port}", None, [], []),
            "tcp-tls": _Way(f"tcp:127.0.0.1:{tls_port}", context, [], []),
        }
        for _ in range(ROUNDS):
            for way in ways.values():
                _measure(way, seconds / ROUNDS)
    by_tcp = statistics.median(ways["tcp"].messages_s)
    for path, way in ways.items():
        p50, p99 = (float(np.percentile(way.messages_s, share)) for share in (50, 99))
        yield RoundTrip(
            path=path,
            messages=len(way.messages_s),
            p50_us=round(p50 * 1e6, 1),
            p99_us=round(p99 * 1e6, 1),
            over_tcp=round(p50 / by_tcp, 3),
            connects=len(way.connects_s),
            connect_p50_us=round(statistics.median(way.connects_s) * 1e6, 1),
        )


def _measure(way: _Way, seconds: float) -> None:
    """One round."""
    for _ in range(CONNECTS):
        began_s = time.perf_counter()
        client = NodeClient(way.address, tls=way.tls)
        way.connects_s.append(time.perf_counter() - began_s)
        client.close()
    with closing(NodeClient(way.address, tls=way.tls)) as client:
        until_s = time.perf_counter() + seconds
        while not way.messages_s or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            client.ask(Ping, Done)
            way.messages_s.append(time.perf_counter() - began_s)
