"""Facts of a running cluster: workers over HTTP, pool nodes by their own protocol. What they say is not
believed to be of any form or size before it was checked.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdserve.doctor.asking import UNREADABLE, Answer, Asker, NoAnswer, TooLate
from pdserve.doctor.facts import PoolNode, Worker
from pdserve.errors import ConfigError, PoolError
from pdserve.kvpool.admin.node_client import TIMEOUT_S, NodeClient, all_nodes, in_parallel
from pdserve.kvpool.protocol.cluster_messages import DEAD, MAX_MEMBERS
from pdserve.kvpool.protocol.messages import NodeAddress, StatusReport
from pdserve.router.fleet.worker import foreign_info

T = TypeVar("T")

FULL: Final = 0.95  # of a quota
ARGUMENTS_S: Final = 30.0  # for a step of SGLang's to end, a long prefill on a processor
UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
MAX_WORKERS: Final = 1024  # of one router
MAX_PAGE_TOKENS: Final = 65_536


def trust_in(ca_file: Path | None, own_file: Path | None) -> ssl.SSLContext | None:
    """`ca_file`: certificates of authorities. `own_file`: of a router on this host, which alone is trusted
    then, by whatever name it is reached. None without either. Raises ConfigError.
    """
    if ca_file is None and own_file is None:
        return None
    try:
        if ca_file is not None:
            return ssl.create_default_context(cafile=str(ca_file))
        assert own_file is not None
        text, end = own_file.read_text(encoding="ascii"), "-----END CERTIFICATE-----"
        trust = ssl.create_default_context(cadata=text[: text.index(end) + len(end)])  # not who signed it
    except (OSError, ValueError) as error:  # also ssl.SSLError, a chain without a certificate
        raise ConfigError(f"the certificates {ca_file or own_file} cannot be read: {error}") from None
    trust.check_hostname = False
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return trust


# --- what is said, as far as it is used here

Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
Gigabytes: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]


class _Member(msgspec.Struct):
    id: Text
    tls: bool = False
    role: Text = ""
    engine: Text | None = None
    absent: dict[str, Any] = {}


class _RouterReady(msgspec.Struct):
    workers: Annotated[list[_Member], Meta(max_length=MAX_WORKERS)] | None = None


class _Ready(msgspec.Struct):
    """`/pd/ready`."""

    ready: bool = False
    draining: bool = False
    pool: Text = "down"


class _Info(msgspec.Struct):
    """`/pd/info`. An older worker leaves some out."""

    role: Text | None = None
    model: Text | None = None
    tasks: list[Text] | None = None
    context_length: Count | None = None
    page_size: Annotated[int, Meta(ge=0, le=MAX_PAGE_TOKENS)] | None = None
    namespace: Text | None = None
    kv_geometry: dict[str, Any] | None = None
    tokenizer: Text | None = None
    chat_template: Text | None = None
    pdserve_version: Text | None = None
    sglang_version: Text | None = None


class _Server(msgspec.Struct):
    """SGLang's `/get_server_info`."""

    max_total_num_tokens: Count | None = None
    hicache_size: Gigabytes | None = None
    hicache_ratio: Gigabytes | None = None
    hicache_write_policy: Text | None = None
    hicache_storage_prefetch_policy: Text | None = None
    hicache_storage_backend_extra_config: str | dict[str, Any] | None = None
    hicache_host_memory_mode: Text | None = None
    disable_radix_cache: bool | None = None


class _Node(msgspec.Struct):
    address: Text


class _Pool(msgspec.Struct):
    nodes: Annotated[list[_Node], Meta(max_length=MAX_MEMBERS)] | None = None
    data_path: Text = "auto"


class _Pdserve(msgspec.Struct):
    pool: _Pool | None = None


class _Storage(msgspec.Struct):
    """The storage backend's extra config."""

    prefetch_threshold: Count | None = None
    pdserve: _Pdserve | None = None


class Member(NamedTuple):
    """A worker, as a router knows it. `engine`: of one without routes under `/pd/`; empty: it has them."""

    url: str
    role: str = ""
    engine: str = ""


def members(router_url: str) -> tuple[tuple[Member, ...], str]:
    """(the workers that a router has, why there are none)"""
    try:
        said = Asker("").get(f"{router_url}/ready", TIMEOUT_S).decoded(_RouterReady)
    except NoAnswer as error:
        return (), f"{router_url}/ready does not answer as a router's does: {error}"
    if said.workers is None:
        return (), f"{router_url} does not tell who its workers are (it asks for API keys)"
    return tuple(map(_member, said.workers)), f"{router_url} has none"


def _member(said: _Member) -> Member:
    engine = (said.engine or "") if "info" in said.absent else ""
    return Member(f"{'https' if said.tls else 'http'}://{said.id}", said.role, engine)


def gather_workers(
    asked: Sequence[Member],
    token: str,
    timeout_s: float = TIMEOUT_S,
    arguments_s: float = ARGUMENTS_S,
    clock: Callable[[], float] = time.time,
    trust: ssl.SSLContext | None = None,
) -> list[Worker]:
    """Each, asked at the same time. `token`: the cluster's, for workers that the operator named;
    `timeout_s`: for each answer, but `arguments_s` to tell SGLang's; `trust`: the certificates that the
    router has for workers.
    """
    asker = Asker(token, trust, asks_all=trust is None)
    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(lambda one: _worker(asker, one, timeout_s, arguments_s, clock), asked))


def _worker(
    asker: Asker, member: Member, timeout_s: float, arguments_s: float, clock: Callable[[], float]
) -> Worker:
    url = member.url
    if member.engine:
        return _foreign(asker, member, timeout_s, clock)
    try:
        said = asker.get(f"{url}/pd/ready", timeout_s)
        if said.status == NOT_FOUND:
            return _foreign(asker, member, timeout_s, clock)
        ahead_s = _ahead_s(said.headers.get("date", ""), clock())
        told = _checked(said, 200, 503).decoded(dict[str, Any])
        ready = _taken(told, _Ready)
    except NoAnswer as error:
        return Worker(url=url, error=f"does not answer as a pdserve worker does: {error}")
    try:
        answer = asker.get(f"{url}/pd/info", timeout_s)
        if answer.status == UNAUTHORIZED and not asker.has_secret:
            return Worker(
                url=url,
                ready=ready.ready,
                draining=ready.draining,
                described=False,
                guarded=True,
                clock_ahead_s=ahead_s,
            )
        info = _checked(answer).decoded(dict[str, Any])
        return worker_of(url, told, info, _arguments(asker, url, arguments_s), ahead_s)
    except NoAnswer as error:
        if ready.ready:
            return Worker(url=url, error=f"does not answer as a pdserve worker does: {error}")
        return Worker(url=url, draining=ready.draining, described=False, clock_ahead_s=ahead_s)


def _foreign(asker: Asker, member: Member, timeout_s: float, clock: Callable[[], float]) -> Worker:
    """A worker without routes under `/pd/`, by its engine's own."""
    try:
        health = asker.get(f"{member.url}/health", timeout_s)
        known = Worker(
            url=member.url,
            ready=health.status == 200,
            role=member.role,
            engine=member.engine,
            clock_ahead_s=_ahead_s(health.headers.get("date", ""), clock()),
        )
        models = asker.get(f"{member.url}/v1/models", timeout_s)
        if models.status == UNAUTHORIZED and not asker.has_secret:
            return msgspec.structs.replace(known, described=False, guarded=True)
        found = foreign_info(_checked(models).body)
        model = msgspec.convert(found.model, Text)
    except (NoAnswer, *UNREADABLE, ValueError) as error:
        what = member.engine or "pdserve"
        return Worker(url=member.url, error=f"does not answer as a {what} worker does: {error}")
    facts = {"engine": found.engine, "model": model, "context_length": found.context_length}
    return msgspec.structs.replace(known, **facts)


def _arguments(asker: Asker, url: str, timeout_s: float) -> dict[str, Any] | None:
    """SGLang's; None: it had no time to tell them. It does between two steps, and a step on a processor may
    take long.
    """
    try:
        return _checked(asker.get(f"{url}/get_server_info", timeout_s)).decoded(dict[str, Any])
    except TooLate:
        return None


def _checked(answer: Answer, *statuses: int) -> Answer:
    """Raises NoAnswer for one that has none of these statuses (none given: 200)."""
    if answer.status == UNAUTHORIZED:
        raise NoAnswer("the cluster's token is another one there")
    if answer.status not in (statuses or (200,)):
        raise NoAnswer(f"{answer.path}: status {answer.status}")
    return answer


def _taken(said: dict[str, Any], type_: type[T]) -> T:
    """The part that is used. Raises NoAnswer where that is of another form."""
    try:
        return msgspec.convert(said, type_)
    except UNREADABLE as error:
        raise NoAnswer(f"{error}") from None


def _ahead_s(date: str, now_s: float) -> float:
    """How far the clock of who wrote an HTTP date is ahead; a date has whole seconds."""
    try:
        ahead_s = parsedate_to_datetime(date).timestamp() - now_s
    except (ValueError, OverflowError, OSError):
        return 0.0
    return ahead_s if ahead_s > 0 else min(0.0, ahead_s + 1.0)


def worker_of(
    url: str, ready: dict[str, Any], info: dict[str, Any], server: dict[str, Any] | None, ahead_s: float
) -> Worker:
    """From the answers of `/pd/ready`, `/pd/info` and `/get_server_info`, None where that did not come.
    Raises NoAnswer where one has another form.
    """
    state, facts, arguments = _taken(ready, _Ready), _taken(info, _Info), _taken(server or {}, _Server)
    storage = _storage(arguments.hicache_storage_backend_extra_config or {})
    pool = storage.pdserve.pool if storage.pdserve else None
    device = arguments.max_total_num_tokens or 0
    size = int((arguments.hicache_size or 0) * 10**9)
    by_ratio = 0 if size else int(device * (arguments.hicache_ratio or 0))
    return Worker(
        url=url,
        ready=state.ready,
        draining=state.draining,
        busy=server is None,
        pool=state.pool,
        role=facts.role or "",
        model=facts.model or "",
        generates="generate" in (facts.tasks or ("generate",)),  # an older worker names none
        context_length=facts.context_length or 0,
        page_size=facts.page_size or 0,
        namespace=facts.namespace or "",
        geometry=facts.kv_geometry or {},
        tokenizer=facts.tokenizer or "",
        chat_template=facts.chat_template or "",
        versions=f"pdserve {facts.pdserve_version}, SGLang {facts.sglang_version}",
        clock_ahead_s=ahead_s,
        has_storage=pool is not None,
        write_policy=arguments.hicache_write_policy or "",
        prefetch_policy=arguments.hicache_storage_prefetch_policy or "",
        prefetch_threshold=storage.prefetch_threshold or 256,
        device_tokens=device,
        host_tokens=by_ratio,
        host_bytes=size,
        keeps_host_pages=arguments.hicache_host_memory_mode != "buffer_only",
        radix_cache=not arguments.disable_radix_cache,
        pool_nodes=tuple(node.address for node in (pool.nodes if pool else None) or ()),
        data_path=pool.data_path if pool else "auto",
    )


def _storage(said: str | dict[str, Any]) -> _Storage:
    """Raises NoAnswer."""
    try:
        return msgspec.json.decode(said, type=_Storage) if isinstance(said, str) else _taken(said, _Storage)
    except UNREADABLE as error:
        raise NoAnswer(f"the storage backend's extra config: {error}") from None


def with_host_tokens(worker: Worker, nodes: Iterable[PoolNode]) -> Worker:
    """Where its host memory was set in bytes: the room there, from the length of its pages in the pool. Not
    known where pages have parts of different lengths.
    """
    if worker.geometry.get("parts"):
        return worker
    for node in nodes:
        page_bytes = node.page_bytes.get(worker.namespace, 0)
        if worker.host_bytes and page_bytes:
            tokens = worker.host_bytes // page_bytes * worker.page_size
            return msgspec.structs.replace(worker, host_tokens=tokens)
    return worker


def gather_pool(addresses: Sequence[str], tls: ssl.SSLContext | None = None) -> list[PoolNode]:
    """Every node that those at the addresses know, and those addresses that do not answer. `tls`: for nodes
    with certificates. No more are asked than a pool can have.
    """
    seeds = [NodeAddress(address, address) for address in dict.fromkeys(addresses)]
    nodes: dict[str, NodeAddress] = {}
    dead: list[PoolNode] = []
    answers = in_parallel(seeds[:MAX_MEMBERS], lambda seed: all_nodes(seed.address, "", TIMEOUT_S, tls))
    for seed, known in zip(seeds, answers, strict=False):
        if isinstance(known, PoolError):
            dead.append(PoolNode(address=seed.address, error=str(known)))
        else:
            nodes |= {node.node: node for node in known}

    def ask(node: NodeAddress) -> PoolNode:
        with NodeClient(node.address, tls=tls) as client:
            return node_of(node.address, client.status())

    asked = list(nodes.values())[:MAX_MEMBERS]
    found = []
    for node, answer in zip(asked, in_parallel(asked, ask), strict=True):
        if isinstance(answer, PoolError):
            answer = PoolNode(address=node.address, node=node.node, error=str(answer))
        found.append(answer)
    reached = {node.address for node in found}
    found += [node for node in dead if node.address not in reached]
    if (left := max(len(seeds), len(nodes)) - MAX_MEMBERS) > 0:
        error = f"{left:,} more are named, and not asked: a pool has at most {MAX_MEMBERS:,} nodes"
        found.append(PoolNode(address="other nodes", error=error))
    return found


def node_of(address: str, report: StatusReport) -> PoolNode:
    """From a node's own report."""
    spaces = report.namespaces
    return PoolNode(
        address=address,
        node=report.node,
        epoch=report.epoch,
        capacity_bytes=report.capacity_bytes,
        free_bytes=report.free_bytes,
        tail_bytes=report.counters.get("tail_bytes", 0),
        evictions=sum(space.evictions for space in spaces),
        dead_members=tuple(member.node for member in report.members if member.status == DEAD),
        full_namespaces=tuple(
            space.name
            for space in spaces
            if space.settings.quota_bytes and space.slot_bytes >= FULL * space.settings.quota_bytes
        ),
        unwritable_tiers=tuple(tier.name for tier in report.tiers if not tier.writable),
        page_bytes={space.name: space.page_bytes // space.pages for space in spaces if space.pages},
    )
