"""Asking pool nodes, for the command line: one question to one node, or the same to all at once.

Every question has a deadline. A node that does not answer is an error for that node alone.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import typer

from pdserve.errors import ConfigError, PoolError, PoolRefused, PoolUnavailable
from pdserve.kvpool.protocol.cluster_messages import LEFT, MAX_MEMBERS
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import NodeAddress, Reply, Request, Status, StatusReport
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.security.tls import Certificates, TlsConfig

R = TypeVar("R", bound=Reply)
T = TypeVar("T")

TIMEOUT_S: Final = 5.0
MAX_PARALLEL: Final = 32  # nodes asked at the same time

Address: TypeAlias = Annotated[str, typer.Argument(help="Control address: unix:/path or tcp:host:port.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token to send; it may be in PDSERVE_POOL_TOKEN too."),
]
Timeout: TypeAlias = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Longest wait for each node's answer.")
]


TlsCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", envvar="PDSERVE_POOL_TLS_CA", help="Authorities of nodes reached by TLS."
    ),
]
TlsCertificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-certificate",
        metavar="FILE",
        envvar="PDSERVE_POOL_TLS_CERTIFICATE",
        help="Certificate for nodes that ask for one.",
    ),
]
TlsKey: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", envvar="PDSERVE_POOL_TLS_KEY", help="Key of the certificate."),
]


def chosen_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """For connections by TLS; None: without. Raises ConfigError."""
    return Certificates(tls_files(ca, certificate, key)).client_context


def tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsConfig:
    """The files that the options name. Raises ConfigError."""
    try:
        return TlsConfig(ca=ca, certificate=certificate, key=key)
    except ValueError:
        raise ConfigError("--tls-certificate and --tls-key are given together, or none of them") from None


class Asking(NamedTuple):
    """What the options that all commands share say: which node to ask, and how."""

    address: str
    json: bool
    token: str
    timeout_s: float
    tls: ssl.SSLContext | None = None

    def node(self, address: str | None = None) -> NodeClient:
        """A connection to this node, the given one by default. Raises PoolError, ConfigError."""
        where = self.address if address is None else address
        return NodeClient(where, self.token, self.timeout_s, self.tls)

    def all_nodes(self) -> list[NodeAddress]:
        """Every node that the given one knows. Raises PoolError, ConfigError."""
        return all_nodes(self.address, self.token, self.timeout_s, self.tls)


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command line of `command(asking, ...)`: its own options, and those of `Asking`."""

    def run(
        address: Address,
        as_json: Json = False,
        token_file: TokenFile = None,
        timeout: Timeout = TIMEOUT_S,
        tls_ca: TlsCa = None,
        tls_certificate: TlsCertificate = None,
        tls_key: TlsKey = None,
        **own: Any,
    ) -> None:
        tls = chosen_tls(tls_ca, tls_certificate, tls_key)
        command(Asking(address, as_json, chosen_token(token_file), timeout, tls), **own)

    return with_options_of(run, command)


def with_options_of(run: Callable[..., None], command: Callable[..., None]) -> Callable[..., None]:
    """`run(first, ..., **own)` as a command line with the options of both: `command` takes one argument that
    `run` makes, and then `own`. Typer reads the options from the signature of the result.
    """
    first, *shared, _ = signature(run, eval_str=True).parameters.values()
    _, *own = signature(command, eval_str=True).parameters.values()
    needed = [option for option in own if option.default is option.empty]
    others = [option for option in own if option.default is not option.empty]
    options = [first, *needed, *others, *shared]
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def chosen_token(token_file: Path | None, environ: Mapping[str, str] = os.environ) -> str:
    """The token of the file, or of the environment. Raises ConfigError when the file cannot be read."""
    if token_file is None:
        return environ.get("PDSERVE_POOL_TOKEN", "").strip()
    try:
        return token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {token_file}: cannot be read: {error}") from None


class NodeClient:
    """A connection to one node, for questions only. Raises PoolError from everything."""

    def __init__(
        self,
        address: str,
        token: str = "",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        hello = make_hello("pdserve pool", "", "none", token)
        self._channel = ControlChannel.connect(address, hello, time.monotonic() + timeout_s, tls=tls)
        self._last_id = 0

    @property
    def nodes(self) -> list[NodeAddress]:
        """The ring that the node told at the start."""
        return self._channel.welcome.nodes

    def ask(self, make: Callable[[int], Request], kind: type[R], timeout_s: float | None = None) -> R:
        """The answer to `make(id)`. Raises PoolRefused for a Fault, PoolUnavailable, PoolTimeout."""
        self._last_id += 1
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        return expected(self._channel.call(make(self._last_id), deadline_s), kind, self.address)

    def status(self) -> StatusReport:
        """How the node is."""
        return self.ask(Status, StatusReport)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(
    address: str, make: Callable[[int], Request], kind: type[R], token: str = "", timeout_s: float = TIMEOUT_S
) -> R:
    """One question to one node. Raises PoolError, ConfigError."""
    with NodeClient(address, token, timeout_s) as node:
        return node.ask(make, kind)


def all_nodes(
    address: str, token: str, timeout_s: float, tls: ssl.SSLContext | None = None
) -> list[NodeAddress]:
    """Every node that the one at `address` knows, itself too, by name; without nodes that left. Raises
    PoolError, also where it names more than a pool can have.
    """
    with NodeClient(address, token, timeout_s, tls) as node:
        report = node.status()
        ring = node.nodes
    addresses = {each.node: each.address for each in ring}
    addresses |= {member.node: member.address for member in report.members if member.status != LEFT}
    addresses[report.node] = address  # as we reached it
    if len(addresses) > MAX_MEMBERS:
        raise PoolRefused(
            f"pool node {address} names {len(addresses):,} nodes, a pool has at most {MAX_MEMBERS:,}"
        )
    return [NodeAddress(name, addresses[name]) for name in sorted(addresses)]


def in_parallel(nodes: Iterable[NodeAddress], work: Callable[[NodeAddress], T]) -> list[T | PoolError]:
    """`work(node)` of each, or its PoolError, in order."""

    def guarded(node: NodeAddress) -> T | PoolError:
        try:
            return work(node)
        except PoolError as error:
            return error
        except ConfigError as error:  # another node names it, at an address that is none
            return PoolUnavailable(str(error))

    with ThreadPoolExecutor(MAX_PARALLEL) as threads:
        return list(threads.map(guarded, nodes))
