"""Configuration of a pool node. The client's is in `client/config.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.discovery.dns import is_dns_name, parse_dns_name
from pdserve.errors import ConfigError
from pdserve.kvpool.node.config.cluster import ClusterConfig, MovingConfig
from pdserve.kvpool.node.config.events import EventsConfig
from pdserve.kvpool.node.config.namespaces import NamespaceConfig, NamespaceDefaults
from pdserve.kvpool.node.memory.placement import Placement
from pdserve.kvpool.node.memory.slab_size import MAX_SLAB_BYTES, MIN_SLOT_BYTES, slab_for
from pdserve.kvpool.protocol.address import LOOPBACK_DEVICE, TcpAddress, parse_address
from pdserve.logs import LogFormat, LogLevel
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import Secret, given_secret, secret_of
from pdserve.sizes import parse_bytes as parse_bytes


class UcxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data path to clients on other hosts."""

    enabled: Annotated[bool, Meta(description="Offer UCX to clients that cannot map the arena.")] = True
    trusted_network: Annotated[
        bool,
        Meta(
            description="Offer UCX to clients on other hosts. Everyone who reaches UCX's ports can write "
            "this process's memory, without any token."
        ),
    ] = False
    devices: Annotated[
        str,
        Meta(
            description="Network devices for UCX, like `eth1` or `mlx5_0:1`, with commas between them. "
            "Empty: loopback unless the network is trusted, else all."
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="First of 64 ports for UCX, one per connection; 0: any free ports."),
    ] = 0
    options: Annotated[
        dict[str, str], Meta(description="UCX settings without their UCX_ prefix, e.g. TLS, NET_DEVICES.")
    ] = {}

    @property
    def settings(self) -> dict[str, str]:
        """UCX settings for the node: the options, and what follows from the other fields."""
        devices = self.devices or ("" if self.trusted_network else LOOPBACK_DEVICE)
        return {**({"NET_DEVICES": devices} if devices else {}), **self.options}


class TcpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data path to clients on other hosts where the network is not trusted, or has no UCX."""

    enabled: Annotated[bool, Meta(description="Offer TCP to clients that cannot map the arena.")] = True
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="Port for the data connections of all clients; 0: any free port."),
    ] = 0


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A storage tier below memory."""

    kind: Annotated[str, Meta(description="`ssd`, `object`, or another kind that is installed.")]
    path: Annotated[
        Path,
        Meta(
            description="Directory that only this tier of this node uses; of `object`, for pages on their "
            "way to the bucket."
        ),
    ]
    capacity_bytes: Annotated[
        int | str,
        Meta(
            description="Most space on the medium, in bytes or like `200GiB`; of `object`, for all nodes "
            "together."
        ),
    ]
    write: Annotated[
        Literal["cold", "all"],
        Meta(
            description="Pages written in the background. cold: pages that memory will evict soon, and in "
            "lower tiers those that leave the tier above; all: every page, so that a reboot loses none, and "
            "in lower tiers every page that the first one stores."
        ),
    ] = "cold"
    threads: Annotated[int, Meta(ge=1, le=64, description="Number of reading threads.")] = 4
    options: Annotated[
        dict[str, str | int | float | bool],
        Meta(
            description="Options of the kind; of `ssd`: segment_bytes, direct, compression, keys; those "
            "of `object`: docs/pool.md."
        ),
    ] = {}

    @property
    def capacity(self) -> int:
        """`capacity_bytes` as a number."""
        return parse_bytes(self.capacity_bytes)

    def __post_init__(self) -> None:
        if self.capacity <= 0:
            raise ValueError("tiers: capacity_bytes must be positive")


class PoolNodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool node: a host's share of the pool."""

    name: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the node, unique."),
    ] = "pool0"
    listen: Annotated[
        list[str],
        Meta(min_length=1, description="Control addresses: `unix:/path` or `tcp:host:port`, any number."),
    ] = msgspec.field(default_factory=lambda: ["tcp:127.0.0.1:7700"])
    capacity_bytes: Annotated[
        int | str,
        Meta(
            description="Memory for pages, in bytes or like `4GiB`; allocated at the start. `auto`: a "
            "quarter of the memory of its host or container, at most three quarters of what `arena_dir` has "
            "free, and at most 2 GiB on a host without a GPU; a node that starts again keeps its size."
        ),
    ] = "1GiB"
    page_bytes: Annotated[
        int | str,
        Meta(
            description="Size of the pool's largest pages. The memory is divided into slabs of one size of "
            "page each; slabs become so large that such pages leave at most 10 % of them unused. 0: unknown; "
            "then slabs have 32 MiB, or a sixteenth of a smaller capacity, and no page may be larger."
        ),
    ] = 0
    arena_dir: Annotated[
        Path, Meta(description="Directory in memory (tmpfs, hugetlbfs) for the arena and its slot table.")
    ] = Path("/dev/shm/pdserve")
    huge_pages: Annotated[
        Literal["off", "advise", "2MiB", "1GiB"],
        Meta(
            description="Memory pages of the arena. `2MiB`, `1GiB`: huge pages of a mounted hugetlbfs; "
            "`advise`: transparent huge pages in a tmpfs mounted with huge=advise."
        ),
    ] = "off"
    huge_pages_dir: Annotated[
        Path | None,
        Meta(description="Directory in a hugetlbfs; none: the hugetlbfs mounted with this page size."),
    ] = None
    numa_node: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="NUMA node of the arena's memory; none: any."),
    ] = None
    keep: Annotated[bool, Meta(description="Keep the pages in memory at a clean stop.")] = True
    fresh: Annotated[bool, Meta(description="Start empty even if there is an earlier arena.")] = False
    lease_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time that a reader may hold a page, and that a writer may take from "
            "reserving one to committing it. After a crash, slots that were being written rest for so long.",
        ),
    ] = 30.0
    max_connections: Annotated[
        int, Meta(ge=1, description="Most open connections; with `admin_token` clients of one token get 3/4.")
    ] = 1024
    max_client_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Most of the capacity that one connection may have reserved, and that it may have "
            "pinned, as a share; beyond it, writes are refused and reads miss.",
        ),
    ] = 0.5
    tiers: Annotated[
        list[TierConfig], Meta(description="Storage below memory, the fastest first; empty: memory only.")
    ] = []
    promotion_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest wait of a read for pages that are loaded from a tier.")
    ] = 1.0
    ucx: Annotated[UcxConfig, Meta(description="The data path to other hosts.")] = UcxConfig()
    tcp: Annotated[TcpConfig, Meta(description="The data path to other hosts without UCX.")] = TcpConfig()
    cluster: Annotated[ClusterConfig, Meta(description="The other nodes.")] = ClusterConfig()
    namespaces: Annotated[
        list[NamespaceConfig],
        Meta(description="Namespaces to make at the start; `pdserve pool ns` makes and changes them later."),
    ] = []
    namespace_defaults: Annotated[
        NamespaceDefaults, Meta(description="For namespaces that workers make by opening them.")
    ] = NamespaceDefaults()
    admin_token: Annotated[
        Secret,
        Meta(
            description="Token for operations on the node and on all namespaces: plain, or `sha256:` and "
            "its digest; also from PDSERVE_POOL_ADMIN_TOKEN. Empty: none is needed, and no namespace can "
            "have tokens."
        ),
    ] = Secret("")

    insecure: Annotated[
        bool,
        Meta(
            description="Serve other hosts without tokens: everyone who reaches a port of `listen` reads and "
            "writes pages, or joins the pool."
        ),
    ] = False
    tls: Annotated[
        TlsConfig,
        Meta(description="Certificates for connections by TCP. Nodes of one pool need `ca` for each other."),
    ] = TlsConfig()
    events: Annotated[
        EventsConfig, Meta(description="Events of the node's pages, for routers of other stacks.")
    ] = EventsConfig()
    metrics: Annotated[
        str, Meta(description="Address of the Prometheus metrics, like `127.0.0.1:9100`; empty: no metrics.")
    ] = ""
    metrics_token: Annotated[
        Secret,
        Meta(
            description="Token that the metrics ask for, as `Authorization: Bearer TOKEN`; also from "
            "PDSERVE_METRICS_TOKEN. Empty: none is needed."
        ),
    ] = Secret("")
    log_format: Annotated[
        LogFormat, Meta(description="text: lines for people; json: one object per line with the same facts.")
    ] = "text"
    log_level: Annotated[LogLevel, Meta(description="Lowest level that is logged.")] = "info"
    moving: Annotated[MovingConfig, Meta(description="Pages that change their owner.")] = MovingConfig()
    stop_when_drained: Annotated[
        bool, Meta(description="End the process as soon as `pdserve pool drain` has moved its pages away.")
    ] = False

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
        capacity = parse_bytes(self.capacity_bytes)
        if capacity < MIN_SLOT_BYTES:
            raise ValueError(f"capacity_bytes must be at least {MIN_SLOT_BYTES >> 10}KiB")
        if not 0 <= parse_bytes(self.page_bytes) <= min(capacity, MAX_SLAB_BYTES):
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
        """The node decides its capacity when it starts (`node/auto_capacity.py`); until then it has no
        `capacity` and no `slab`.
        """
        return self.capacity_bytes == "auto"

    @property
    def capacity(self) -> int:
        """`capacity_bytes` as a number, rounded down to whole slabs."""
        return parse_bytes(self.capacity_bytes) // self.slab * self.slab

    @property
    def slab(self) -> int:
        """Size of the slabs."""
        return slab_for(
            parse_bytes(self.page_bytes),
            capacity_bytes=parse_bytes(self.capacity_bytes),
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
