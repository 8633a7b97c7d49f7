"""A worker as the router knows it: its description, its abilities, its load, its circuit. Pure.

pdserve's workers have routes under `/pd/` for all that the router asks of them beside answers. Another engine
may have some of them, and says in its `/pd/info` which it `lacks`. A server without `/pd/info` is known by
what it says of itself elsewhere (`foreign_info`). The stages of a request ask `Worker.lacks`, and compare no
names of engines.

The circuit breaker of one worker, fed by the outcome of requests:

closed --(so many failures in a row)---> open until `retry_at_s`
open   --(retry_at_s passed)-----------> half-open: the worker is eligible
half-open --(selected)-----------------> open: this request is a trial, the others wait for it
open   --(the trial's stream begins)---> half-open: the next request can be a trial, since a stream is long
any    --(success: a whole answer)-----> closed

How large a request's body can be also follows from what workers say of their model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

import msgspec
import xxhash

from pdserve.router.config.addresses import is_https, parse_base_url

Ability = Literal[
    "info", "load", "prefill", "settled", "pull", "continue", "cache_report", "weights", "salt_header"
]

WITHOUT: Final[dict[Ability, str]] = {
    "info": "its model is as its /v1/models says, its role as the router's configuration does",
    "load": "its load is what this router sends it",
    "prefill": "a prompt is prefilled by a request for one token, and nobody waits for its pages in the pool",
    "settled": "a session's next turn does not wait for the pages of the last one",
    "pull": "no pages of long prompts are read ahead",
    "continue": "a lost stream is not continued by another worker",
    "cache_report": "no figures of what was cached, but those in the answer's own usage",
    "weights": "its weights are not updated by the admin API",
    "salt_header": "tenants cannot use the endpoints where the salt of their cache goes in a header",
}
"""What is so at a worker that lacks it, for people."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards_decoder = msgspec.json.Decoder(_Cards)


class Foreign(msgspec.Struct, frozen=True):
    """A server of another engine, as its `/v1/models` describes it."""

    engine: str
    model: str
    context_length: int


ENGINES: Final = frozenset({"vllm"})
"""Values of `owned_by` of the engines whose servers are taken without routes under `/pd/`."""


def foreign_info(answer: bytes) -> Foreign:
    """From an answer to `GET /v1/models`. Raises ValueError, and what decoding raises: it is none of
    `ENGINES`.
    """
    cards = _cards_decoder.decode(answer).data
    card = next((card for card in cards if not card.parent), None)
    if card is None:
        raise ValueError("its /v1/models lists no model")
    if card.owned_by not in ENGINES:
        raise ValueError(f"its /v1/models says '{card.owned_by[:32]}'")
    return Foreign(card.owned_by, card.id, max(0, min(card.max_model_len or 0, 10**12)))


class CircuitBreaker:
    """Closed, open or half-open."""

    def __init__(self) -> None:
        self.failures = 0
        """Failed requests in a row. 0: nothing keeps requests away, and the circuit is closed."""
        self.retry_at_s = 0.0
        """0: closed. Otherwise open until this time, and half-open after it."""
        self.trial = 0
        """Number of the last trial. A failure raises it too."""

    @property
    def is_closed(self) -> bool:
        """Requests come and go as usual."""
        return not self.retry_at_s

    def lets_through(self, now_s: float) -> bool:
        """The circuit is closed or half-open."""
        return now_s >= self.retry_at_s

    def on_selected(self, now_s: float, open_s: float) -> int:
        """A request goes to the worker while the circuit is not closed. Returns the number of its trial."""
        self.retry_at_s = now_s + open_s
        self.trial += 1
        return self.trial

    def on_trial_answering(self, trial: int, now_s: float) -> bool:
        """The stream of a trial has begun as it should. True if that makes the circuit half-open: not after a
        newer failure, since a worker that breaks off its streams still begins one after the other.
        """
        if trial != self.trial or self.is_closed:
            return False
        self.retry_at_s = now_s
        return True

    def on_success(self) -> bool:
        """A request was answered to its end. True if that changes anything."""
        if not self.failures and not self.retry_at_s:
            return False
        self.failures, self.retry_at_s = 0, 0.0
        return True

    def on_failure(self, now_s: float, limit: int, open_s: float) -> bool:
        """A request failed. True if that opens the closed circuit: it is the `limit`th in a row."""
        self.failures += 1
        if self.failures < limit:
            return False
        was_closed = self.is_closed
        self.trial += 1
        self.retry_at_s = now_s + open_s
        return was_closed


LARGEST_BODY_BYTES: Final = 32 * 1024 * 1024
SMALLEST_BODY_BYTES: Final = 4 * 1024 * 1024
"""Room for lists of prompts and for tools, however short the context."""
BODY_BYTES_PER_TOKEN: Final = 64
"""A token of text has about 4 bytes, its number up to 8. JSON's escapes take six times as many."""


def body_limit_bytes(infos: Collection[WorkerInfo]) -> int:
    """A bound on request bodies of all models that no usual request reaches. The largest for media, for lists
    of texts to embed, and where a worker does not say.
    """
    return max(map(_body_limit_bytes, infos), default=LARGEST_BODY_BYTES)


def _body_limit_bytes(info: WorkerInfo) -> int:
    if info.is_multimodal is not False or "embed" in info.tasks or info.context_length <= 0:
        return LARGEST_BODY_BYTES
    needed_bytes = info.context_length * BODY_BYTES_PER_TOKEN
    return min(max(needed_bytes, SMALLEST_BODY_BYTES), LARGEST_BODY_BYTES)


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
    """How it hands prompts over, or takes them (see `placement.planner`)."""
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
    """What cannot be asked of it, of `WITHOUT`."""
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

    def __init__(self, role: Role, url: str) -> None:
        self.host, self.port = parse_base_url(url)
        self.is_tls = is_https(url)
        self.role = role
        self.id = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        self.url = f"{'https' if self.is_tls else 'http'}://{self.id}"
        """Base URL."""
        self.id_header = self.id.encode("ascii", "replace")
        self.rendezvous = xxhash.xxh3_64_intdigest(self.id.encode()) | 1
        """By which a session's hash is multiplied for its score (see `placement.policies`)."""
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
    def is_direct(self) -> bool:
        """A decode worker: it computes no prompt. A prefill worker: it can also hand over directly."""
        if self.info is None or self.info.handoff != "direct":
            return False
        return self.role == "decode" or (self.role == "prefill" and self.info.bootstrap_port is not None)

    def lacks(self, ability: Ability) -> bool:
        """It cannot be asked for this (see `WITHOUT`)."""
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
