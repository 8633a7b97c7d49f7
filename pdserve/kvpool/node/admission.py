"""Which clients a node admits, and how they will move pages; the rules that its state applies to them."""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Callable

from pdserve.errors import ConfigError
from pdserve.extras import how_to_install, is_installed
from pdserve.kvpool.core.events import Connected
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.namespaces.access import guards
from pdserve.kvpool.namespaces.registry import NamespaceError, check_name
from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.namespaces.validation import check_settings, check_tenant_settings
from pdserve.kvpool.node.config.namespaces import settings_of, token_digest
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.serving.places import Places
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
from pdserve.security.failed_logins import FailedLogins
from pdserve.security.tokens import digest, same


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._rules = rules
        self._incarnation = incarnation
        self._host_id = host_id()
        self._places = places
        self._token_digest = token_digest
        self._view = view
        self._clock = clock
        # these two may read the node's memory anyhow
        self._failed_logins = FailedLogins({"uid 0", f"uid {os.getuid()}"})

    def challenge(self, address: str, hello: Hello) -> Challenged | Fault:
        """For a client that names a token. A fault if the token is none of the pool's. `address`: see
        `choose_path`.
        """
        if not self._failed_logins.may_try(address, hello.key_id, self._clock()):
            return self._too_many_guesses(address)
        found = ""
        if hello.node and self._config.cluster.token:
            own = digest(self._config.cluster.token)
            found = own if key_id(own) == hello.key_id else ""
        found = found or self._token_digest(hello.key_id)
        if found:
            return Challenged(hello, found, self._config.name, secrets.token_bytes(NONCE_BYTES))
        self._failed_logins.failed(address, self._clock())
        return self._other_cluster(hello) if hello.node else self._unknown_token(hello)

    def wrong_proof(self, address: str) -> None:
        """A client of this address did not prove the token that it has named."""
        self._failed_logins.failed(address, self._clock())

    def _too_many_guesses(self, address: str) -> Fault:
        message = (
            f"node {self._config.name}: too many tokens came from {address} that it does not know: correct "
            "them there, and try again in a few seconds"
        )
        return Fault(0, "too_many_guesses", message)

    def _other_cluster(self, hello: Hello) -> Fault:
        message = f"node {self._config.name} has another cluster.token than node {hello.node}: give all one"
        return Fault(0, "bad_token", message)

    def _unknown_token(self, hello: Hello) -> Fault:
        message = f"node {self._config.name} does not know the token of client {hello.client}"
        return Fault(0, "bad_token", f"{message}: correct it there, or give it to the pool")

    def choose_path(self, connection: int, address: str, hello: Hello) -> DataPathName | Fault:
        """How the client of this connection will move pages, or why it cannot be served. `address`: the
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
            self._failed_logins.failed(address, self._clock())
            return self._unknown_token(hello)  # who sends a token in clear is not ours: it proves nothing
        if hello.node and not shows_token(hello, self._config):
            return self._other_cluster(hello)
        if not hello.node:
            admin, token = self._rules.admin_token, self.shown_token(hello)
            no_place = self._places.refusal(
                connection, token=token, tokens_in_use=bool(admin), operator=same(token, admin)
            )
            if no_place:
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

    def connected(self, number: int, address: str, hello: Hello, path: DataPathName) -> Connected:
        """The event that a client has shaken hands. `address`: see `choose_path`."""
        if shown := self.shown_token(hello):
            self._failed_logins.proved(address, key_id(shown))
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
