"""Facts of a running cluster: workers over HTTP, pool nodes by their own protocol. What they say is not
believed to be of any form or size before it was checked.

Whoever answers over HTTP may be hostile, and gets no more than this:

| an answer that                | becomes                                                           |
|-------------------------------|-------------------------------------------------------------------|
| is slow, or has no end        | TooLate, once the time for all of it is over                      |
| is longer than MAX_BODY_BYTES | NoAnswer                                                          |
| is compressed                 | NoAnswer: a few bytes of it could become many                     |
| names another place (3xx)     | an answer of that status: following it could carry a secret there |
| is no HTTP                    | NoAnswer                                                          |
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import httpx
import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.doctor.facts import PoolNode, Worker
from pdserve.errors import ConfigError, PdserveError, PoolError
from pdserve.kvpool.admin.node_client import TIMEOUT_S, NodeClient, all_nodes, in_parallel
from pdserve.kvpool.protocol.cluster_messages import DEAD, MAX_MEMBERS
from pdserve.kvpool.protocol.messages import NodeAddress, StatusReport
from pdserve.router.fleet.worker import WorkerInfo, foreign_info

T = TypeVar("T")

MAX_BODY_BYTES: Final = 16 << 20  # a worker's metrics, and SGLang's arguments, are below 1 MiB
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NoAnswer(PdserveError):
    """Nothing came that can be used. The text says why."""


class TooLate(NoAnswer):
    """The whole answer did not come in time."""


class Answer(msgspec.Struct, frozen=True):
    """Of whatever status."""

    path: str
    status: int
    headers: httpx.Headers
    body: bytes

    def decoded(self, type_: type[T]) -> T:
        """The JSON of the body. Raises NoAnswer."""
        try:
            return msgspec.json.decode(self.body, type=type_)
        except UNREADABLE as error:
            raise NoAnswer(f"{self.path}: {error}") from None


class Asker:
    """Asks. Threads may share it; they must run no event loop."""

    def __init__(self, secret: str, trust: ssl.SSLContext | None = None, *, asks_all: bool = True) -> None:
        """A secret is sent only to whom we trust: `trust`, else the system's authorities. Without a secret,
        everybody is asked if `asks_all`.
        """
        self.has_secret = bool(secret)
        self._headers = {"accept-encoding": "identity"}
        if secret:
            self._headers["authorization"] = f"Bearer {secret}"
        needs_trust = self.has_secret or not asks_all
        self._tls = trust if needs_trust and trust else httpx.create_ssl_context(verify=needs_trust)

    def get(self, url: str, total_s: float) -> Answer:
        """The answer. Raises NoAnswer."""
        return asyncio.run(self._ask("GET", url, total_s, {}, None))

    def post(self, url: str, body: Any, headers: Mapping[str, str], total_s: float) -> Answer:
        """The answer to `body`, sent as JSON. Raises NoAnswer."""
        return asyncio.run(self._ask("POST", url, total_s, headers, body))

    async def _ask(
        self, method: str, url: str, total_s: float, headers: Mapping[str, str], body: Any
    ) -> Answer:
        try:
            async with (
                asyncio.timeout(total_s),
                httpx.AsyncClient(
                    headers=self._headers, timeout=None, trust_env=False, verify=self._tls
                ) as client,
                client.stream(method, url, headers=dict(headers), json=body) as response,
            ):
                whole = await _body(response)
                return Answer(response.url.path, response.status_code, response.headers, whole)
        except TimeoutError:
            raise TooLate(f"{url}: no whole answer within {total_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoAnswer(f"{error}" or type(error).__name__) from None


async def _body(response: httpx.Response) -> bytes:
    """Raises NoAnswer."""
    where = response.url.path
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NoAnswer(f"{where}: the answer is compressed, which nobody asked for")
    whole = bytearray()
    async for piece in response.aiter_raw():
        whole += piece
        if len(whole) > MAX_BODY_BYTES:
            raise NoAnswer(f"{where}: the answer is longer than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(whole)


FULL: Final = 0.95  # of a quota
UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404
FAILED: Final = 500
MAX_WORKERS: Final = 1024  # of one router


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

Text: TypeAlias = Annotated[str, Meta(max_length=4096)]


class _Member(msgspec.Struct):
    id: Text
    tls: bool = False
    role: Text = ""
    engine: Text | None = None
    refused: Text | None = None
    absent: dict[str, Any] = {}


class _RouterReady(msgspec.Struct):
    workers: Annotated[list[_Member], Meta(max_length=MAX_WORKERS)] | None = None


class _Ready(msgspec.Struct):
    """`/pd/ready`."""

    ready: bool = False
    draining: bool = False
    pool: Text = "down"


class Member(NamedTuple):
    """A worker, as a router knows it. `engine`: of one without routes under `/pd/`; empty: it has them."""

    url: str
    role: str = ""
    engine: str = ""
    refused: str = ""


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
    return Member(f"{'https' if said.tls else 'http'}://{said.id}", said.role, engine, said.refused or "")


def gather_workers(
    asked: Sequence[Member],
    token: str,
    timeout_s: float = TIMEOUT_S,
    clock: Callable[[], float] = time.time,
    trust: ssl.SSLContext | None = None,
) -> list[Worker]:
    """Each, asked at the same time. `token`: the cluster's, for workers that the operator named;
    `timeout_s`: for each answer; `trust`: the certificates that the router has for workers.
    """
    asker = Asker(token, trust, asks_all=trust is None)
    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(lambda one: _worker(asker, one, timeout_s, clock), asked))


def _worker(asker: Asker, member: Member, timeout_s: float, clock: Callable[[], float]) -> Worker:
    url = member.url
    try:
        said = None if member.engine else asker.get(f"{url}/pd/ready", timeout_s)
        if said is None or said.status == NOT_FOUND:
            return _foreign(asker, member, timeout_s, clock)
        state = _checked(said, 200, 503).decoded(_Ready)
        known = Worker(
            url=url,
            ready=state.ready,
            draining=state.draining,
            pool=state.pool,
            refused=member.refused,
            clock_ahead_s=_ahead_s(said.headers.get("date", ""), clock()),
        )
        answer = asker.get(f"{url}/pd/info", timeout_s)
        if answer.status == UNAUTHORIZED and not asker.has_secret:
            return replace(known, guarded=True)
        if not state.ready and answer.status >= FAILED:
            return known
        info = _checked(answer).decoded(WorkerInfo)
        return replace(known, role=info.role, info=info)
    except NoAnswer as error:
        return Worker(url=url, error=f"does not answer as a pdserve worker does: {error}")


def _foreign(asker: Asker, member: Member, timeout_s: float, clock: Callable[[], float]) -> Worker:
    """A worker without routes under `/pd/`, by its engine's own."""
    try:
        health = asker.get(f"{member.url}/health", timeout_s)
        known = Worker(
            url=member.url,
            ready=health.status == 200,
            role=member.role,
            refused=member.refused,
            clock_ahead_s=_ahead_s(health.headers.get("date", ""), clock()),
        )
        models = asker.get(f"{member.url}/v1/models", timeout_s)
        if models.status == UNAUTHORIZED and not asker.has_secret:
            return replace(known, guarded=True)
        found = foreign_info(_checked(models).body)
    except (NoAnswer, *UNREADABLE, ValueError) as error:
        what = member.engine or "pdserve"
        return Worker(url=member.url, error=f"does not answer as a {what} worker does: {error}")
    return replace(known, info=WorkerInfo.of_foreign(found, "agg"))  # its role is the router's word alone


def _checked(answer: Answer, *statuses: int) -> Answer:
    """Raises NoAnswer for one that has none of these statuses (none given: 200)."""
    if answer.status == UNAUTHORIZED:
        raise NoAnswer("the cluster's token is another one there")
    if answer.status not in (statuses or (200,)):
        raise NoAnswer(f"{answer.path}: status {answer.status}")
    return answer


def _ahead_s(date: str, now_s: float) -> float:
    """How far the clock of who wrote an HTTP date is ahead; a date has whole seconds."""
    try:
        ahead_s = parsedate_to_datetime(date).timestamp() - now_s
    except (ValueError, OverflowError, OSError):
        return 0.0
    return ahead_s if ahead_s > 0 else min(0.0, ahead_s + 1.0)


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
    )
