"""What a configuration leaves open, beside the threat model in docs/security.md. Pure: one function for each
kind of part, each finding one line of that document.

Only what other hosts reach is judged: a part that listens on loopback is open to users of its host alone,
whom its tokens keep out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias, assert_never
from urllib.parse import urlsplit

from pdserve.discovery.config import EtcdConfig
from pdserve.doctor.facts import Finding
from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.protocol.address import is_loopback, is_remote
from pdserve.router.config.router import RouterConfig
from pdserve.security.tokens import MIN_CHARS, SecretFile, reveal

CHECK: Final = "security"


Part: TypeAlias = PoolNodeConfig | WorkerConfig | RouterConfig
KINDS: Final[Mapping[str, type[Part]]] = {
    "pool": PoolNodeConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "agg": WorkerConfig,
    "elastic": WorkerConfig,
    "router": RouterConfig,
}
"""The configuration of each role."""


def judge(parts: Iterable[Part]) -> Iterator[Finding]:
    """What the parts leave open to others; one finding that all is well if nothing is."""
    names, warned = 0, False
    for part in parts:
        names += 1
        for finding in _of(part):
            warned = True
            yield finding
    if names and not warned:
        yield Finding(CHECK, "ok", f"{names} configurations leave nothing open that docs/security.md names")


def _of(part: Part) -> Iterator[Finding]:
    match part:
        case PoolNodeConfig():
            return pool_node(part)
        case WorkerConfig():
            return worker(part)
        case RouterConfig():
            return router(part)
        case _:
            assert_never(part)


def pool_node(config: PoolNodeConfig) -> Iterator[Finding]:
    """What strangers find at a pool node."""
    who = f"pool node {config.name}"
    yield from _etcd(who, config.cluster.etcd)
    if not isinstance(config.admin_token, SecretFile) and 0 < len(reveal(config.admin_token)) < MIN_CHARS:
        says = f"{who}: admin_token is shorter than {MIN_CHARS} characters and can be guessed"
        yield _warn(says, "make one with `openssl rand -base64 32`")
    if config.events.address and config.events.trusted_network:
        says = f"{who}: its events at {config.events.address} tell every host which prompts were served"
        yield _warn(says, "publish them on loopback, or close their ports to all but the routers")
    if not any(is_remote(address) for address in config.listen):
        return
    if config.insecure:
        says = f"{who}: insecure = true lets every host that reaches it use the pool without a token"
        yield _warn(says, "set admin_token_file, a token for namespaces, and cluster.token_file")
    if not config.tls.as_server:
        says = f"{who}: without tls, pages and prompts can be read and changed on the wire"
        yield _warn(says, "launch/make_certs.sh makes certificates for its tls table")
    host = config.metrics.rpartition(":")[0].strip("[]")
    if config.metrics and not is_loopback(host) and not config.metrics_token:
        says = f"{who}: its metrics at {config.metrics} tell every host of namespaces and clients"
        yield _warn(says, "set metrics_token_file, or metrics to an address of loopback")
    ucx = config.ucx
    if ucx.enabled and ucx.trusted_network:
        where = f"on {ucx.devices}" if ucx.devices else "on all interfaces"
        says = f"{who}: UCX listens {where} in a network that is said to be trusted: who reaches it owns it"
        change = "close its ports to all but workers and nodes, or use the TCP data path"
        if not ucx.devices:
            change = f"name the interfaces in ucx.devices; {change}"
        yield _warn(says, change)


def worker(config: WorkerConfig) -> Iterator[Finding]:
    """What strangers find at a worker."""
    who = f"worker at {config.engine.host}:{config.engine.port}"
    yield from _etcd(who, config.etcd)
    yield from _etcd(who, config.pool.etcd)
    if config.insecure:
        says = f"{who}: insecure = true lets all who reach it generate, and users of its host control SGLang"
        yield _warn(says, "set cluster_token_file here and at the router")
    if config.handoff == "direct":
        says = f"{who}: handoff = direct opens ports on all interfaces: who reaches them changes its KV"
        yield _warn(says, "close them to all but the workers of this model, or use handoff = pool")
    for node in config.pool.nodes:
        if is_remote(node.address) and not config.pool.tls.as_client:
            says = f"{who}: pages go to pool node {node.node} without encryption"
            yield _warn(says, "set pool.tls.ca, and tls at the node")
            break


def router(config: RouterConfig) -> Iterator[Finding]:
    """What strangers find at the router."""
    who = f"router at {config.host}:{config.port}"
    yield from _etcd(who, config.etcd)
    if config.insecure:
        says = f"{who}: insecure = true lets all who reach it use the models"
        yield _warn(says, "set access.keys_file (`pdserve key TENANT --file FILE`)")
    if not is_loopback(config.host) and config.access.tls_cert_file is None:
        says = f"{who}: without TLS, API keys and prompts can be read on the wire"
        yield _warn(says, "set access.tls_cert_file and tls_key_file, or put a proxy with TLS before it")
    admin = config.admin
    if admin.port is not None and not is_loopback(admin.host) and not admin.tls.as_server:
        says = f"{who}: the admin API listens at {admin.host}, in plain HTTP: its key can be read"
        yield _warn(says, "set admin.tls.certificate and key, or admin.host to 127.0.0.1")
    plain = [url for url in config.listed if _is_plain(url)]
    if plain:
        says = f"{who}: prompts and the cluster token go to {plain[0]} without encryption"
        yield _warn(says, "use https:// URLs, or a network that nobody else can read")


def _etcd(who: str, config: EtcdConfig) -> Iterator[Finding]:
    if not config.endpoints:
        return
    plain = [url for url in config.endpoints if _is_plain(url)]
    if plain:
        says = f"{who}: etcd at {plain[0]} without TLS: who is on the wire reads its password, changes keys"
        yield _warn(says, "use https:// endpoints, with etcd.ca_file")
    if not config.username and not config.certificate_file:
        says = f"{who}: etcd asks us for no password and no certificate: whoever reaches it changes keys"
        yield _warn(says, "set etcd.username and password_file, or etcd.certificate_file")


def _is_plain(url: str) -> bool:
    """Whether somebody on the wire can read what goes there."""
    parts = urlsplit(url)
    return parts.scheme in ("http", "dns+http") and not is_loopback(parts.hostname or "")


def _warn(says: str, change: str) -> Finding:
    return Finding(CHECK, "warn", says, change)
