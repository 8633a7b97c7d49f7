"""Configuration of a pool node. The client's is in `client/config.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.discovery.config import EtcdConfig
from pdserve.discovery.dns import is_dns_name, parse_dns_name
from pdserve.errors import ConfigError
from pdserve.kvpool.namespaces.access import TOKENS
from pdserve.kvpool.node.memory.placement import MAX_SLAB_BYTES, MIN_SLOT_BYTES, Placement, slab_for
from pdserve.kvpool.protocol.address import LOOPBACK_DEVICE, TcpAddress, parse_address
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.kvpool.protocol.kv_events import EventFormat
from pdserve.logs import LogFormat, LogLevel
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import MIN_CHARS, Secret, digest_of_setting, given_secret, is_digest, secret_of
from pdserve.sizes import Size, SizeOrAuto, parse_bytes


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that a node belongs to. A loss is noticed within 2 s."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "pool"
    """Name of the pool; a node of another pool is refused."""
    peers: list[str] = []
    """Addresses of other nodes; its own address may be among them. One node that answers is enough: it names
    the others. `dns+tcp:NAME:PORT`: all addresses that DNS gives the name, looked up every 5 s.
    """
    etcd: EtcdConfig = EtcdConfig()
    """Where nodes keep their addresses for clients, and find each other."""
    advertise: str = ""
    """Address of this node for clients and other nodes; empty: the first of `listen`."""
    token: Secret = Secret("")
    """Secret of the pool's nodes, equal on all of them; also from PDSERVE_POOL_CLUSTER_TOKEN."""
    ping_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    """A node without an answer for this long is suspected, and dead if no other node reaches it in half of
    this. Pings follow each other in 0.3 of it.
    """


class MovingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node pushes pages to their owners when the ring has changed."""

    bytes_s: Annotated[Size, Meta(ge=0)] = 500_000_000
    """Most bytes pushed per second, like `500MB`; 0: no limit."""


LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events of stored and removed pages over ZeroMQ, for routers of other stacks."""

    address: str = ""
    """ZeroMQ address of the events, like `tcp://127.0.0.1:5557` or `ipc:///run/a/b`; empty: no events.
    Whoever reaches it reads them, without a token.
    """
    format: EventFormat = "blocks"
    """blocks: events of SGLang and vLLM; objects: those of Mooncake, which Dynamo's KV router reads."""
    topic: Annotated[str, Meta(max_length=256)] = ""
    """Topic of each batch; llm-d wants `kv@POD@MODEL`."""
    namespaces: list[str] = []
    """Namespaces whose pages are told; empty: all that have no tokens."""
    trusted_network: bool = False
    """Publish to other hosts. Everyone who reaches the ports learns which prompts were served, if he guesses
    them.
    """

    def __post_init__(self) -> None:
        if self.address:
            _check_events_address("events.address", self.address, self.trusted_network)


def _check_events_address(name: str, address: str, trusted: bool) -> None:
    """Raises ValueError."""
    parts = urlsplit(address)
    try:
        is_address = parts.scheme == "ipc" or (parts.scheme == "tcp" and bool(parts.hostname and parts.port))
    except ValueError:  # of the port
        is_address = False
    if not is_address:
        raise ValueError(f"{name} must be like tcp://127.0.0.1:5557 or ipc:///run/a/b, found {address!r}")
    if parts.scheme == "tcp" and parts.hostname not in LOOPBACK_HOSTS and not trusted:
        raise ValueError(
            f"{name}: other hosts reach {address}, and events ask for no token: use a loopback address, or "
            "set events.trusted_network = true"
        )


class NamespaceDefaults(NamespaceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a namespace may do on each node, with its tokens as the file gives them."""

    read_token: Secret = Secret("")
    """Token required to read: plain, or `sha256:` and its digest; empty: none."""
    write_token: Secret = Secret("")
    """Token required to write; it permits reading too. Empty: as read_token."""
    admin_token: Secret = Secret("")
    """Token required to clear, drop, replace or change the namespace. Empty: as write_token."""


class NamespaceConfig(NamespaceDefaults, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A namespace that the node makes at its start."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    """Name of the namespace, as workers request it."""


def settings_of(config: NamespaceDefaults) -> NamespaceSettings:
    """As the nodes know them: tokens as digests. Reads the token files. Raises ConfigError."""
    label = f"namespace '{config.name}'" if isinstance(config, NamespaceConfig) else "namespace_defaults"
    given = {name: getattr(config, name) for name in NamespaceSettings.__struct_fields__}
    try:
        return NamespaceSettings(**given | {name: token_digest(name, given[name]) for name in TOKENS})
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


def token_digest(name: str, given: Secret) -> str:
    """The digest of a token given as text or in a file; empty for none. Raises ConfigError."""
    token = given_secret(given, "", {})
    if 0 < len(token) < MIN_CHARS and not token.startswith("sha256:"):
        raise ConfigError(f"{name} must be {MIN_CHARS} characters or more; `pdserve key` makes one")
    found = digest_of_setting(token)
    if found and not is_digest(found):
        raise ConfigError(f"{name}: after `sha256:` must come 64 hexadecimal digits")
    return found


class UcxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data path to clients on other hosts."""

    enabled: bool = True
    """Offer UCX to clients that cannot map the arena."""
    trusted_network: bool = False
    """Offer UCX to clients on other hosts. Everyone who reaches UCX's ports can write this process's memory,
    without any token.
    """
    devices: str = ""
    """Network devices for UCX, like `eth1` or `mlx5_0:1`, with commas between them. Empty: loopback unless
    the network is trusted, else all.
    """
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """First of 64 ports for UCX, one per connection; 0: any free ports."""
    options: dict[str, str] = {}
    """UCX settings without their UCX_ prefix, e.g. TLS, NET_DEVICES."""

    @property
    def settings(self) -> dict[str, str]:
        """UCX settings for the node: the options, and what follows from the other fields."""
        devices = self.devices or ("" if self.trusted_network else LOOPBACK_DEVICE)
        return {**({"NET_DEVICES": devices} if devices else {}), **self.options}


class TcpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data path to clients on other hosts where the network is not trusted, or has no UCX."""

    enabled: bool = True
    """Offer TCP to clients that cannot map the arena."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port for the data connections of all clients; 0: any free port."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A storage tier below memory."""

    kind: str
    """`ssd`, `object`, or another kind that is installed."""
    path: Path
    """Directory that only this tier of this node uses; of `object`, for pages on their way to the bucket."""
    capacity_bytes: Annotated[Size, Meta(gt=0)]
    """Most space on the medium, like `200GiB`; of `object`, for all nodes together."""
    write: Literal["cold", "all"] = "cold"
    """Pages written in the background. cold: pages that memory will evict soon, and in lower tiers those that
    leave the tier above; all: every page, so that a reboot loses none, and in lower tiers every page that the
    first one stores.
    """
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Number of reading threads."""
    options: dict[str, str | int | float | bool] = {}
    """Options of the kind; of `ssd`: segment_bytes, direct, compression, keys; those of `object`:
    docs/pool.md.
    """


class PoolNodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool node: a host's share of the pool."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "pool0"
    """Name of the node, unique."""
    listen: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["tcp:127.0.0.1:7700"]
    )
    """Control addresses: `unix:/path` or `tcp:host:port`, any number."""
    capacity_bytes: SizeOrAuto = 1 << 30
    """Memory for pages, like `4GiB`; allocated at the start. `auto`: a quarter of the memory of its host or
    container, at most three quarters of what `arena_dir` has free, and at most 2 GiB on a host without a GPU;
    a node that starts again keeps its size.
    """
    page_bytes: Size = 0
    """Size of the pool's largest pages. The memory is divided into slabs of one size of page each; slabs
    become so large that such pages leave at most 10 % of them unused. 0: unknown; then slabs have 32 MiB, or
    a sixteenth of a smaller capacity, and no page may be larger.
    """
    arena_dir: Path = Path("/dev/shm/pdserve")
    """Directory in memory (tmpfs, hugetlbfs) for the arena and its slot table."""
    huge_pages: Literal["off", "advise", "2MiB", "1GiB"] = "off"
    """Memory pages of the arena. `2MiB`, `1GiB`: huge pages of a mounted hugetlbfs; `advise`: transparent
    huge pages in a tmpfs mounted with huge=advise.
    """
    huge_pages_dir: Path | None = None
    """Directory in a hugetlbfs; none: the hugetlbfs mounted with this page size."""
    numa_node: Annotated[int, Meta(ge=0)] | None = None
    """NUMA node of the arena's memory; none: any."""
    keep: bool = True
    """Keep the pages in memory at a clean stop."""
    fresh: bool = False
    """Start empty even if there is an earlier arena."""
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest time that a reader may hold a page, and that a writer may take from reserving one to committing
    it. After a crash, slots that were being written rest for so long.
    """
    max_connections: Annotated[int, Meta(ge=1)] = 1024
    """Most open connections; with `admin_token` clients of one token get 3/4."""
    max_client_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Most of the capacity that one connection may have reserved, and that it may have pinned, as a share;
    beyond it, writes are refused and reads miss.
    """
    tiers: list[TierConfig] = []
    """Storage below memory, the fastest first; empty: memory only."""
    promotion_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    """Longest wait of a read for pages that are loaded from a tier."""
    ucx: UcxConfig = UcxConfig()
    """The data path to other hosts."""
    tcp: TcpConfig = TcpConfig()
    """The data path to other hosts without UCX."""
    cluster: ClusterConfig = ClusterConfig()
    """The other nodes."""
    namespaces: list[NamespaceConfig] = []
    """Namespaces to make at the start; `pdserve pool ns` makes and changes them later."""
    namespace_defaults: NamespaceDefaults = NamespaceDefaults()
    """For namespaces that workers make by opening them."""
    admin_token: Secret = Secret("")
    """Token for operations on the node and on all namespaces: plain, or `sha256:` and its digest; also from
    PDSERVE_POOL_ADMIN_TOKEN. Empty: none is needed, and no namespace can have tokens.
    """

    insecure: bool = False
    """Serve other hosts without tokens: everyone who reaches a port of `listen` reads and writes pages, or
    joins the pool.
    """
    tls: TlsConfig = TlsConfig()
    """Certificates for connections by TCP. Nodes of one pool need `ca` for each other."""
    events: EventsConfig = EventsConfig()
    """Events of the node's pages, for routers of other stacks."""
    metrics: str = ""
    """Address of the Prometheus metrics, like `127.0.0.1:9100`; empty: no metrics."""
    metrics_token: Secret = Secret("")
    """Token that the metrics ask for, as `Authorization: Bearer TOKEN`; also from PDSERVE_METRICS_TOKEN.
    Empty: none is needed.
    """
    log_format: LogFormat = "text"
    """text: lines for people; json: one object per line with the same facts."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""
    moving: MovingConfig = MovingConfig()
    """Pages that change their owner."""
    stop_when_drained: bool = False
    """End the process as soon as `pdserve pool drain` has moved its pages away."""

    def __post_init__(self) -> None:
        if self.metrics and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):\d{1,5}", self.metrics):
            raise ValueError(f"metrics must be host:port or empty, found {self.metrics!r}")
        if not self.is_auto:
            self._check_sizes()
        if len({tier.path for tier in self.tiers}) != len(self.tiers):
            raise ValueError("tiers must have different paths")
        self._check_cluster()
        if len({namespace.name for namespace in self.namespaces}) != len(self.namespaces):
            raise ValueError("namespaces must have different names")

    def _check_sizes(self) -> None:
        capacity = self._capacity_bytes
        if capacity < MIN_SLOT_BYTES:
            raise ValueError(f"capacity_bytes must be at least {MIN_SLOT_BYTES >> 10}KiB")
        if not 0 <= self.page_bytes <= min(capacity, MAX_SLAB_BYTES):
            most = f"capacity_bytes and {MAX_SLAB_BYTES >> 30}GiB"
            raise ValueError(f"page_bytes must be at most {most}: larger pages never fit")
        page = self.placement.huge_page_bytes
        if page and self.capacity % page:
            raise ValueError(
                f"capacity_bytes, in whole slabs, must be a multiple of {self.huge_pages} with huge_pages "
                f"of that size, it is {self.capacity}"
            )

    def _check_cluster(self) -> None:
        cluster = self.cluster
        try:
            names = [address for address in cluster.peers if is_dns_name(address)]
            for address in names:
                parse_dns_name(address, "tcp")
            for address in {self.address, *cluster.peers}.difference(names):
                parse_address(address)
        except (ConfigError, ValueError) as error:
            raise ValueError(f"cluster: {error}") from error
        if names and self.tls.as_client:
            raise ValueError(
                f"cluster.peers: {names[0]}: DNS gives addresses, and certificates name hosts: with tls.ca "
                "list the nodes by their names, as tcp:HOST:PORT"
            )
        if self.tls.as_server and not self.tls.as_client:
            raise ValueError(
                "tls.ca is needed beside tls.certificate: without it, the node speaks to others in clear"
            )
        if not self.alone and _is_wildcard(self.address):
            raise ValueError(
                f"cluster.advertise is needed: {self.address} is no address that another host can connect to"
            )

    @property
    def alone(self) -> bool:
        """Whether the node looks for no others by itself; others may find it all the same."""
        return not (self.cluster.peers or self.cluster.etcd.endpoints)

    @property
    def address(self) -> str:
        """Where clients and other nodes reach the node."""
        return self.cluster.advertise or self.listen[0]

    @property
    def weight(self) -> int:
        """The node's share of the ring: its capacity in GiB."""
        return max(1, round(self.capacity / (1 << 30)))

    @property
    def placement(self) -> Placement:
        """What the arena is made of."""
        hugetlb = self.huge_pages not in ("off", "advise")
        return Placement(
            huge_page_bytes=parse_bytes(self.huge_pages) if hugetlb else 0,
            advise=self.huge_pages == "advise",
            hugetlbfs=self.huge_pages_dir,
            numa_node=self.numa_node,
        )

    @property
    def is_auto(self) -> bool:
        """The node decides its capacity when it starts (`node/bootstrap.py`); until then it has no
        `capacity` and no `slab`.
        """
        return self.capacity_bytes == "auto"

    @property
    def capacity(self) -> int:
        """`capacity_bytes` as a number, rounded down to whole slabs."""
        return self._capacity_bytes // self.slab * self.slab

    @property
    def _capacity_bytes(self) -> int:
        assert self.capacity_bytes != "auto", "with_capacity has not decided it yet"
        return self.capacity_bytes

    @property
    def slab(self) -> int:
        """Size of the slabs."""
        return slab_for(
            self.page_bytes,
            capacity_bytes=self._capacity_bytes,
            unit_bytes=self.placement.huge_page_bytes or 1,
        )


def with_secrets(config: PoolNodeConfig, environ: Mapping[str, str]) -> PoolNodeConfig:
    """The configuration with its own secrets themselves, wherever they were given. Those of namespaces stay
    as they are. Raises ConfigError.
    """
    token = secret_of("cluster.token", config.cluster.token, "PDSERVE_POOL_CLUSTER_TOKEN", environ)
    metrics = secret_of("metrics_token", config.metrics_token, "PDSERVE_METRICS_TOKEN", environ)
    return replace(
        config,
        metrics_token=Secret(metrics),
        admin_token=Secret(given_secret(config.admin_token, "PDSERVE_POOL_ADMIN_TOKEN", environ)),
        cluster=replace(config.cluster, token=Secret(token)),
    )


def _is_wildcard(address: str) -> bool:
    parsed = parse_address(address)
    return isinstance(parsed, TcpAddress) and parsed.host in ("0.0.0.0", "::")
