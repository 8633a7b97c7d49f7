"""Which clients a node admits, and how they will move pages; the rules that its state applies to them.

A stranger can open sockets as fast as the kernel makes them, and can begin a frame on each. Strangers are
sockets that have not shaken hands, and clients without a token where the pool has tokens. Four bounds keep
places and memory for the clients:

| bound | who goes |
|---|---|
| `max_greeting` strangers | the oldest of the address that has most of them |
| `max_connections` clients | a new client is refused |
| three quarters of these show one token, other than the node's `admin_token` | a new client that shows it |
| `MAX_HALF_FRAMES_BYTES` of frames that are not whole | the socket that holds most of them |

Nodes of the pool are always let in. An address is an IP address, or a user of this host ("uid 1000"). Nothing
bounds how often tokens may be tried: they have `MIN_CHARS` characters at least, and whoever fails is left
waiting (serving/connection.py).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Final

from pdserve.errors import ConfigError
from pdserve.extras import how_to_install, is_installed
from pdserve.kvpool.core.events import Connected
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.namespaces.access import guards
from pdserve.kvpool.namespaces.registry import (
    NamespaceError,
    check_name,
    check_settings,
    check_tenant_settings,
)
from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.node.config import PoolNodeConfig, settings_of, token_digest
from pdserve.kvpool.protocol.address import is_ipv6, is_loopback, is_remote
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, Challenged, key_id
from pdserve.kvpool.protocol.messages import (
    PROTOCOL_VERSION,
    ArenaInfo,
    DataPathName,
    Fault,
    Hello,
    TcpInfo,
    UcxInfo,
    Welcome,
)
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.connection_limits import ConnectionLimit
from pdserve.security.tokens import digest, same

MIN_GREETING: Final = 64
"""So many may shake hands at a time even where `max_connections` is less."""
MAX_HALF_FRAMES_BYTES: Final = 64 * 1024 * 1024
"""16 frames of the largest kind."""


def max_greeting(max_connections: int) -> int:
    """Strangers at a time: all clients of a node that was started again, while they shake hands."""
    return max(MIN_GREETING, max_connections)


class Places:
    """Counts the sockets of one node by number."""

    def __init__(self, max_connections: int, *, tokens_in_use: bool) -> None:
        self._max_connections = max_connections
        self._tokens_in_use = tokens_in_use
        self._strangers: ConnectionLimit[int] = ConnectionLimit(max_greeting(max_connections))
        self._clients: dict[int, str] = {}
        """Digest of the token that the client has shown, by number."""
        self._half_frame_bytes: dict[int, int] = {}

    @property
    def sockets(self) -> int:
        """All that are open."""
        return len(self._strangers) + len(self._clients)

    @property
    def half_frames_bytes(self) -> int:
        """Held of frames that are not whole."""
        return sum(self._half_frame_bytes.values())

    def accepted(self, number: int, address: str) -> int | None:
        """A socket was accepted. The number of a socket to close for it, if there are too many; its place is
        free at once.
        """
        return self._strangers.came(number, address)

    def refusal(self, *, token: str, operator: bool = False) -> str:
        """Why a socket gets no client's place; empty if it gets one, or needs none. `token`: digest of a
        known one, if the client shows one. `operator`: it is the node's `admin_token`.
        """
        limit = self._max_connections
        if self._tokens_in_use and not token:
            return ""
        if len(self._clients) >= limit:
            return f"the node holds {limit} connections already"
        same = sum(other == token for other in self._clients.values())
        if operator or not self._tokens_in_use or same < max(1, limit * 3 // 4):
            return ""
        return f"the node holds {same} connections with this token already: raise max_connections"

    def greeted(self, number: int, *, token: str) -> None:
        """The socket has shaken hands. `token`: see `refusal`."""
        if token or not self._tokens_in_use:
            self._strangers.left(number)
            self._clients[number] = token

    def holds(self, number: int, half_frame_bytes: int) -> int | None:
        """The socket has sent so many bytes of a frame that is not whole. The number of a socket to close, if
        all together hold too many.
        """
        if half_frame_bytes:
            self._half_frame_bytes[number] = half_frame_bytes
        else:
            self._half_frame_bytes.pop(number, None)
            return None
        if self.half_frames_bytes <= MAX_HALF_FRAMES_BYTES:
            return None
        largest = max(self._half_frame_bytes, key=self._half_frame_bytes.__getitem__)
        del self._half_frame_bytes[largest]
        return largest

    def closed(self, number: int) -> None:
        """The socket is closed."""
        self._strangers.left(number)
        self._clients.pop(number, None)
        self._half_frame_bytes.pop(number, None)


def rules_of(config: PoolNodeConfig) -> Rules:
    """Raises ConfigError: a quota larger than the node, an unknown policy, a token that cannot be read."""
    rules = Rules(
        admin_token=token_digest("admin_token", config.admin_token),
        defaults=settings_of(config.namespace_defaults),
        named={namespace.name: settings_of(namespace) for namespace in config.namespaces},
    )
    tokens_allowed = bool(rules.admin_token)
    for label, name, settings in [
        ("namespace_defaults", "", rules.defaults),
        *((f"namespace '{name}'", name, settings) for name, settings in rules.named.items()),
    ]:
        try:
            if name:
                check_name(name)
            if split(name)[1]:
                check_tenant_settings(name, settings)
            check_settings(settings, config.capacity, tokens_allowed=tokens_allowed)
        except NamespaceError as error:
            raise ConfigError(f"node {config.name}: {label}: {error}") from None
    return rules


def check_open(config: PoolNodeConfig, rules: Rules) -> list[str]:
    """The tokens that are missing for a node that other hosts reach, which `insecure` allows. Raises
    ConfigError where it does not.
    """
    remote = [address for address in config.listen if is_remote(address)]
    needed = {
        "admin_token": rules.admin_token,
        "cluster.token": config.cluster.token,
        "namespace_defaults.read_token": guards(rules.defaults)[0],
        **{f"read_token of namespace '{name}'": guards(one)[0] for name, one in rules.named.items()},
    }
    missing = [name for name, token in needed.items() if remote and not token]
    if missing and not config.insecure:
        raise ConfigError(
            f"node {config.name}: other hosts reach {remote[0]}, and there is no {', no '.join(missing)}: "
            "set each, as NAME_file, or insecure = true"
        )
    return missing


class Admission:
    """Answers Hello. `places`: the node's sockets; `view`: the ring as the node knows it;
    `token_digest(key_id)`: the digest of a token of the pool; empty if the key id names none.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        rules: Rules,
        incarnation: int,
        places: Places,
        view: Callable[[], View],
        token_digest: Callable[[bytes], str],
    ) -> None:
        self._config = config
        self._rules = rules
        self._incarnation = incarnation
        self._host_id = host_id()
        self._places = places
        self._token_digest = token_digest
        self._view = view

    def challenge(self, hello: Hello) -> Challenged | Fault:
        """For a client that names a token. A fault if the token is none of the pool's."""
        found = ""
        if hello.node and self._config.cluster.token:
            own = digest(self._config.cluster.token)
            found = own if key_id(own) == hello.key_id else ""
        found = found or self._token_digest(hello.key_id)
        if found:
            return Challenged(hello, found, self._config.name, secrets.token_bytes(NONCE_BYTES))
        return self._other_cluster(hello) if hello.node else self._unknown_token(hello)

    def _other_cluster(self, hello: Hello) -> Fault:
        message = f"node {self._config.name} has another cluster.token than node {hello.node}: give all one"
        return Fault(0, "bad_token", message)

    def _unknown_token(self, hello: Hello) -> Fault:
        message = f"node {self._config.name} does not know the token of client {hello.client}"
        return Fault(0, "bad_token", f"{message}: correct it there, or give it to the pool")

    def choose_path(self, address: str, hello: Hello) -> DataPathName | Fault:
        """How a client will move pages, or why it cannot be served. `address`: the
        client's IP address, or "uid N" for a Unix socket.
        """
        name = self._config.name
        if hello.version != PROTOCOL_VERSION:
            message = (
                f"node {name} speaks version {PROTOCOL_VERSION} of the pool protocol, client "
                f"{hello.client} version {hello.version}: install the same version on both"
            )
            return Fault(0, "protocol_version", message)
        if hello.token and not hello.key_id:
            return self._unknown_token(hello)  # who sends a token in clear is not ours: it proves nothing
        if hello.node and not shows_token(hello, self._config):
            return self._other_cluster(hello)
        if not hello.node:
            admin, token = self._rules.admin_token, self.shown_token(hello)
            if no_place := self._places.refusal(token=token, operator=same(token, admin)):
                return Fault(0, "too_many_connections", no_place)
        if hello.data_path == "none":
            return "none"
        if hello.data_path in ("auto", "shm") and hello.host_id == self._host_id:
            return "shm"  # the client finds out itself whether the files it maps are ours
        if hello.data_path == "shm":
            message = (
                f"client {hello.client} cannot map the memory of node {name}: it is on another host, or in "
                "another container; use data_path = 'ucx' or 'tcp'"
            )
            return Fault(0, "data_path", message)
        no_ucx = self._no_ucx(address, hello)
        no_tcp = "" if self._config.tcp.enabled else f"has TCP off, which client {hello.client} needs"
        encrypts = self._config.tls.as_server and not _is_local(address)
        if hello.data_path == "auto" and encrypts and not no_tcp:
            return "tcp"  # UCX would send in clear what the client came by TLS to protect
        if hello.data_path in ("auto", "ucx") and not no_ucx:
            return "ucx"
        if hello.data_path in ("auto", "tcp") and not no_tcp:
            return "tcp"
        return Fault(0, "data_path", f"node {name} {no_tcp if hello.data_path == 'tcp' else no_ucx}")

    def _no_ucx(self, address: str, hello: Hello) -> str:
        """Why this client gets no UCX; empty if it gets it.

        Whoever reaches a port of UCX can write the memory of this process, so strangers get no such port.
        """
        ucx = self._config.ucx
        if not ucx.enabled:
            return f"has UCX off, which client {hello.client} needs"
        if not is_installed("ucx"):
            return f"has no UCX, which client {hello.client} needs: {how_to_install('ucx')} there"
        if is_ipv6(address):
            return (
                f"has no UCX over IPv6, by which client {hello.client} came, since UCXX listens on IPv4 "
                "only: give the node an IPv4 address, or the client data_path = 'tcp'"
            )
        if not _is_local(address) and not ucx.trusted_network:
            return (
                f"offers no UCX to other hosts, like that of client {hello.client}: where everyone who "
                "reaches the node's ports may write its memory, set ucx.trusted_network = true on it"
            )
        if self._rules.admin_token and not self.shown_token(hello):
            return f"offers UCX only to clients with a token, unlike client {hello.client}"
        return ""

    def welcome(self, path: DataPathName, arena: ArenaInfo | None, info: UcxInfo | TcpInfo | None) -> Welcome:
        """The answer to a Hello."""
        view = self._view()
        return Welcome(
            version=PROTOCOL_VERSION,
            node=self._config.name,
            incarnation=self._incarnation,
            host_id=self._host_id,
            data_path=path,
            lease_s=self._config.lease_s,
            arena=arena,
            ucx=info if isinstance(info, UcxInfo) else None,
            tcp=info if isinstance(info, TcpInfo) else None,
            epoch=view.epoch,
            nodes=view.nodes,
            previous=view.previous,
        )

    def shown_token(self, hello: Hello) -> str:
        """The digest of the token of this pool that the client shows, for whatever right; empty: of none."""
        if not hello.token:
            return ""
        presented = digest(hello.token)
        if is_peer(hello, self._config, self._rules):
            return presented
        return presented if same(presented, self._token_digest(key_id(presented))) else ""

    def connected(self, number: int, hello: Hello, path: DataPathName) -> Connected:
        """The event that a client has shaken hands."""
        peer = is_peer(hello, self._config, self._rules)
        return Connected(number, path, hello.client, hello.pid, peer, digest(hello.token))


def _is_local(address: str) -> bool:
    """Whether a client of this address is on the node's host."""
    return address.startswith("uid ") or is_loopback(address)


def shows_token(hello: Hello, config: PoolNodeConfig) -> bool:
    """Whether a client presents the cluster's token, or none where the cluster has none."""
    return hmac.compare_digest(hello.token.encode(), config.cluster.token.encode())


def is_peer(hello: Hello, config: PoolNodeConfig, rules: Rules) -> bool:
    """Whether a client is a node of this pool: where tokens are in use, it must show the cluster's."""
    proves_it = bool(config.cluster.token) or not rules.admin_token
    return bool(hello.node) and proves_it and shows_token(hello, config)
