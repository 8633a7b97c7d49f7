"""A worker as the router knows it: its own description, its load and its health. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pdserve.discovery.host_socket import NAME_PATTERN, is_of_port
from pdserve.router.config.addresses import is_https, parse_base_url
from pdserve.router.fleet.abilities import WITHOUT, Ability, Foreign
from pdserve.router.fleet.circuit_breaker import CircuitBreaker

Role = Literal["prefill", "decode", "agg", "elastic"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "agg", "elastic")
BOTH: tuple[Role, ...] = ("agg", "elastic")
"""Roles of workers that serve prefill and decode."""
Source = Literal["config", "admin", "dns", "etcd"]
"""The origin of a worker's membership."""
DISCOVERED: frozenset[Source] = frozenset({"dns", "etcd"})
"""Sources that name workers by themselves. A router has at most one of them."""
Number = Annotated[int, msgspec.Meta(ge=-(10**12), le=10**12)]
"""What a worker says. JSON's numbers have no end, and beyond a float's range costs cannot be compared."""
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's answer to `GET /pd/info`. Other members of the answer are ignored."""

    role: Role
    model: str
    context_length: Number = 0
    page_size: Number = 0
    info_tag: str = ""
    """Of this answer; `/pd/ready` says another one when it has changed. Empty: the worker does not say."""
    namespace: str = ""
    kv_geometry: dict[str, Any] = {}
    model_path: str = ""
    pdserve_version: str = ""
    sglang_version: str = ""
    deterministic: bool = False
    """Sampling is reproducible from the request's seed (SGLang: --enable-deterministic-inference)."""
    handoff: Literal["pool", "direct"] = "pool"
    """How it hands prompts over, or takes them (see `placement.handoff`)."""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """Where decode workers find a prefill worker that hands over directly."""
    tasks: tuple[str, ...] = ("generate",)
    """Tasks of its model: generate, embed."""
    tokenizer: str = ""
    """A fingerprint. Empty: the worker does not say."""
    chat_template: str = ""
    is_multimodal: bool | None = None
    """The model takes images, video or audio. None: the worker does not say."""
    names_media: bool = False
    """It waits for the pages of prompts with media, too."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that it started with."""
    takes_salt_header: bool = False
    """`x-pdserve-cache-salt` keeps caches apart there, at endpoints where SGLang takes no salt."""
    priorities: Literal["none", "high_first", "low_first"] = "none"
    """Which `priority` its scheduler serves first. none: it does not look at them."""
    engine: str = "sglang"
    """What computes there. Workers of two engines share no pages."""
    lacks: tuple[str, ...] = ()
    """What cannot be asked of it, of `abilities.WITHOUT`."""
    host_socket: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)] = ""
    """Its Unix socket, for routers of the same host (`pdserve.discovery.host_socket`). Empty: it has none."""
    plain_salts: bool = False
    """Its cache takes salts of letters and digits only (LMCache: no slash)."""

    @classmethod
    def of_foreign(cls, found: Foreign, role: Role) -> WorkerInfo:
        """Of a server without routes under `/pd/`: it lacks all of them. The router's configuration says its
        role.
        """
        return cls(
            role,
            found.model,
            context_length=found.context_length,
            engine=found.engine,
            lacks=tuple(WITHOUT),
            plain_salts=True,
        )


class WorkerLoad(msgspec.Struct, frozen=True):
    """How busy a worker says it is: `load` in its answer to `GET /pd/ready`."""

    running_requests: Number = 0
    waiting_requests: Number = 0
    queued_tokens: Number = 0
    """Uncached prompt tokens of the waiting requests."""
    free_kv_tokens: Number | None = None
    max_running_requests: Count = 0
    """Requests that it computes at the same time; further ones wait in it. 0: it does not say."""


class Worker:
    """One worker. `in_flight` is raised when the worker is selected, and lowered when the request ends."""

    __slots__ = (
        "circuit",
        "drained",
        "elsewhere",
        "free_kv_tokens",
        "host",
        "id",
        "id_header",
        "in_flight",
        "incarnation",
        "info",
        "is_tls",
        "max_running",
        "pool_up",
        "port",
        "prefilling",
        "probe_failures",
        "probes_ready",
        "queued_elsewhere",
        "queued_here",
        "ready",
        "refused",
        "role",
        "sources",
        "stopping",
        "url",
    )

    def __init__(self, role: Role, url: str) -> None:
        self.host, self.port = parse_base_url(url)
        self.is_tls = is_https(url)
        self.role = role
        self.id = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        self.url = f"{'https' if self.is_tls else 'http'}://{self.id}"
        """Base URL."""
        self.id_header = self.id.encode("ascii", "replace")
        self.incarnation = self.id
        """Changes whenever the worker comes back, since its memory is empty then."""
        self.in_flight = 0
        self.prefilling = 0
        """Those of `in_flight` that another worker will answer, which has them in its own `in_flight`."""
        self.elsewhere = 0
        """Requests that the worker reports beyond this router's own: those of other routers."""
        self.queued_here = 0
        """Prompt tokens of this router's requests that wait to be computed."""
        self.queued_elsewhere = 0
        """Waiting prompt tokens that the worker reports beyond this router's own."""
        self.pool_up = False
        """The worker reaches the pool, so the pages that it computes are stored there."""
        self.free_kv_tokens: int | None = None
        """Room in its KV memory. None: the worker does not say."""
        self.max_running = 0
        """Requests that it computes at the same time. 0: it does not say."""
        self.sources: set[Source] = set()
        """The worker leaves when no source names it any more."""
        self.ready = False
        self.drained = False
        """The admin API has said that the worker gets no new request."""
        self.stopping = False
        """The worker reports that it stops: it finishes what it has."""
        self.info: WorkerInfo | None = None
        self.refused: str | None = None
        self.probe_failures = 0
        self.probes_ready = 0
        """Probes that said ready, so far. One more than before: the worker was there after that."""
        self.circuit = CircuitBreaker()

    def __repr__(self) -> str:
        return f"Worker({self.role} {self.id})"

    @property
    def draining(self) -> bool:
        """The worker finishes its requests and gets no new one."""
        return self.drained or self.stopping

    @property
    def host_socket(self) -> str:
        """Its Unix socket, which answers on its own host; empty: none is known, or a proxy is between."""
        name = "" if self.info is None else self.info.host_socket
        return name if is_of_port(name, self.port) else ""

    @property
    def is_direct(self) -> bool:
        """A decode worker: it computes no prompt. A prefill worker: it can also hand over directly."""
        if self.info is None or self.info.handoff != "direct":
            return False
        return self.role == "decode" or (self.role == "prefill" and self.info.bootstrap_port is not None)

    def lacks(self, ability: Ability) -> bool:
        """It cannot be asked for this, see `abilities`."""
        return self.info is not None and ability in self.info.lacks

    @property
    def answering(self) -> int:
        """This router's requests that the worker answers, or will."""
        return self.in_flight - self.prefilling

    @property
    def load(self) -> int:
        """Requests at the worker, from all routers as far as known."""
        return self.in_flight + self.elsewhere

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed, from all routers as far as known."""
        return self.queued_here + self.queued_elsewhere
