"""Facts of a running cluster: workers over HTTP, pool nodes by their own protocol, and a live probe."""

from __future__ import annotations

import json
import random
import re
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from pdserve.doctor.facts import PoolNode, Probe, Turn, Worker
from pdserve.errors import ConfigError, PdserveError, PoolError
from pdserve.kvpool.admin.node_client import TIMEOUT_S, NodeClient, all_nodes, in_parallel
from pdserve.kvpool.protocol.cluster_messages import DEAD
from pdserve.kvpool.protocol.messages import NodeAddress, StatusReport
from pdserve.router.request.cache_report import CACHED_HEADER, PREFILL_CACHED_HEADER, parse_cached

FULL: Final = 0.95  # of a quota
_DECLINED: Final = re.compile(r"^pdserve_worker_fetches_declined_total\{.*\} (\S+)$", re.MULTILINE)
ARGUMENTS_S: Final = 30.0  # for a step of SGLang's to end, a long prefill on a processor
UNAUTHORIZED: Final = 401
PROBE_PAGES: Final = 4
PROBE_TIMEOUT_S: Final = 120.0
LEAST_TOKEN, LAST_TOKEN = 200, 1200  # ids that every vocabulary has, none of them special


def _client(
    secret: str, timeout_s: float, trust: ssl.SSLContext | None = None, *, asks_all: bool = True
) -> httpx.Client:
    """A client that sends a secret only to whom it trusts: `trust`, else the system's authorities. Without a
    secret, everybody is asked if `asks_all`.
    """
    headers = {"authorization": f"Bearer {secret}"} if secret else None
    verify = (trust or True) if secret or not asks_all else False
    return httpx.Client(headers=headers, timeout=timeout_s, trust_env=False, verify=verify)


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


class _Member(msgspec.Struct):
    id: str
    tls: bool = False


class _RouterReady(msgspec.Struct):
    workers: list[_Member] | None = None


def members(router_url: str) -> tuple[tuple[str, ...], str]:
    """(URLs of the workers that a router has, why there are none)"""
    try:
        with _client("", TIMEOUT_S) as client:
            said = msgspec.json.decode(client.get(f"{router_url}/ready").content, type=_RouterReady)
    except (httpx.HTTPError, ValueError) as error:
        return (), f"{router_url}/ready does not answer as a router's does: {error}"
    if said.workers is None:
        return (), f"{router_url} does not tell who its workers are (it asks for API keys)"
    urls = tuple(f"{'https' if one.tls else 'http'}://{one.id}" for one in said.workers)
    return urls, f"{router_url} has none"


def gather_workers(
    urls: Sequence[str],
    token: str,
    timeout_s: float = TIMEOUT_S,
    arguments_s: float = ARGUMENTS_S,
    clock: Callable[[], float] = time.time,
    trust: ssl.SSLContext | None = None,
) -> list[Worker]:
    """Each, asked at the same time. `token`: the cluster's, for workers that the operator named;
    `arguments_s`: time to tell SGLang's; `trust`: the certificates that the router has for workers.
    """
    with (
        _client(token, timeout_s, trust, asks_all=trust is None) as client,
        ThreadPoolExecutor(32) as threads,
    ):
        return list(threads.map(lambda url: _worker(client, url, arguments_s, clock), urls))


def _worker(client: httpx.Client, url: str, arguments_s: float, clock: Callable[[], float]) -> Worker:
    try:
        said = client.get(f"{url}/pd/ready")
        ahead_s = _ahead_s(said.headers.get("date", ""), clock())
        ready = _answer(said, 200, 503)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return Worker(url=url, error=f"does not answer as a pdserve worker does: {error}")
    try:
        told = client.get(f"{url}/pd/info")
        if told.status_code == UNAUTHORIZED and "authorization" not in client.headers:
            return Worker(
                url=url,
                ready=bool(ready.get("ready")),
                draining=bool(ready.get("draining")),
                described=False,
                guarded=True,
                clock_ahead_s=ahead_s,
            )
        info = _answer(told)
        found = worker_of(url, ready, info, _arguments(client, url, arguments_s), ahead_s)
        metrics = client.get(f"{url}/metrics/").text
        return msgspec.structs.replace(found, declined_fetches=declined_fetches(metrics))
    except (httpx.HTTPError, ValueError) as error:
        if ready.get("ready"):
            return Worker(url=url, error=f"does not answer as a pdserve worker does: {error}")
        return Worker(url=url, draining=bool(ready.get("draining")), described=False, clock_ahead_s=ahead_s)


def _arguments(client: httpx.Client, url: str, timeout_s: float) -> dict[str, Any] | None:
    """SGLang's; None: it had no time to tell them. It does between two steps, and a step on a processor may
    take long.
    """
    try:
        return _answer(client.get(f"{url}/get_server_info", timeout=httpx.Timeout(TIMEOUT_S, read=timeout_s)))
    except httpx.ReadTimeout:
        return None


def _answer(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Raises ValueError for what is no object, or of none of these statuses (none given: 200)."""
    if response.status_code == UNAUTHORIZED:
        raise ValueError("the cluster's token is another one there")
    if response.status_code not in (statuses or (200,)) or not isinstance(found := response.json(), dict):
        raise ValueError(f"{response.url.path}: status {response.status_code}")
    return found


def _ahead_s(date: str, now_s: float) -> float:
    """How far the clock of who wrote an HTTP date is ahead; a date has whole seconds."""
    try:
        ahead_s = parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:
        return 0.0
    return ahead_s if ahead_s > 0 else min(0.0, ahead_s + 1.0)


def worker_of(
    url: str, ready: dict[str, Any], info: dict[str, Any], server: dict[str, Any] | None, ahead_s: float
) -> Worker:
    """From the answers of `/pd/ready`, `/pd/info` and `/get_server_info`, None where that did not come."""
    busy, server = server is None, server or {}
    extra = server.get("hicache_storage_backend_extra_config") or "{}"
    storage = json.loads(extra) if isinstance(extra, str) else extra
    pool = (storage.get("pdserve") or {}).get("pool") or {}
    device = int(server.get("max_total_num_tokens") or 0)
    size = int(server.get("hicache_size") or 0) * 10**9
    by_ratio = 0 if size else int(device * float(server.get("hicache_ratio") or 0))
    return Worker(
        url=url,
        ready=bool(ready.get("ready")),
        draining=bool(ready.get("draining")),
        busy=busy,
        pool=str(ready.get("pool", "down")),
        role=str(info.get("role", "")),
        model=str(info.get("model", "")),
        generates="generate" in (info.get("tasks") or ("generate",)),  # an older worker names none
        context_length=int(info.get("context_length") or 0),
        page_size=int(info.get("page_size") or 0),
        namespace=str(info.get("namespace", "")),
        geometry=info.get("kv_geometry") or {},
        tokenizer=str(info.get("tokenizer", "")),
        chat_template=str(info.get("chat_template", "")),
        versions=f"pdserve {info.get('pdserve_version')}, SGLang {info.get('sglang_version')}",
        clock_ahead_s=ahead_s,
        has_storage=bool(pool),
        write_policy=str(server.get("hicache_write_policy", "")),
        prefetch_policy=str(server.get("hicache_storage_prefetch_policy", "")),
        prefetch_threshold=int(storage.get("prefetch_threshold") or 256),
        device_tokens=device,
        host_tokens=by_ratio,
        host_bytes=size,
        keeps_host_pages=server.get("hicache_host_memory_mode") != "buffer_only",
        radix_cache=not server.get("disable_radix_cache"),
        pool_nodes=tuple(str(node["address"]) for node in pool.get("nodes") or ()),
        data_path=str(pool.get("data_path", "auto")),
    )


def declined_fetches(metrics: str) -> int:
    """Of a worker's `/metrics`; 0 where it has none."""
    return int(sum(float(count) for count in _DECLINED.findall(metrics)))


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
    with certificates.
    """
    nodes: dict[str, NodeAddress] = {}
    dead: list[PoolNode] = []
    for address in dict.fromkeys(addresses):
        try:
            nodes |= {node.node: node for node in all_nodes(address, "", TIMEOUT_S, tls)}
        except PdserveError as error:
            dead.append(PoolNode(address=address, error=str(error)))

    def ask(node: NodeAddress) -> PoolNode:
        with NodeClient(node.address, tls=tls) as client:
            return node_of(node.address, client.status())

    found = []
    for node, answer in zip(nodes.values(), in_parallel(nodes.values(), ask), strict=True):
        if isinstance(answer, PoolError):
            answer = PoolNode(address=node.address, node=node.node, error=str(answer))
        found.append(answer)
    known = {node.address for node in found}
    return [*found, *(node for node in dead if node.address not in known)]


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


# --- the live probe


class _Meta(msgspec.Struct):
    prompt_tokens: int


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


def page_sizes(workers: Iterable[Worker]) -> dict[str, int]:
    """Of each model that ready workers generate with; the largest where they differ."""
    sizes: dict[str, int] = {}
    for worker in workers:
        if worker.ready and worker.generates and worker.page_size:
            sizes[worker.model] = max(worker.page_size, sizes.get(worker.model, 0))
    return sizes


def probe(
    router_url: str,
    model: str,
    page_size: int,
    key: str,
    dice: random.Random,
    trust: ssl.SSLContext | None = None,
) -> Probe:
    """Ask the router for a prompt of random tokens and then for the conversation's next turn."""
    prompt = [dice.randrange(LEAST_TOKEN, LAST_TOKEN) for _ in range(PROBE_PAGES * page_size + 7)]
    session = f"pdserve-doctor-{dice.getrandbits(64):x}"
    turns: list[Turn] = []
    with _client(key, PROBE_TIMEOUT_S, trust) as client:
        for _ in range(2):
            body = {
                "model": model,
                "input_ids": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": page_size, "ignore_eos": True},
            }
            started_s = time.monotonic()
            try:
                answer = client.post(f"{router_url}/generate", json=body, headers={"x-session-id": session})
                if answer.status_code != 200:
                    raise ValueError(f"status {answer.status_code}: {answer.text[:300]}")
                generated = msgspec.json.decode(answer.content, type=_Generated)
            except (httpx.HTTPError, ValueError) as error:
                said = f"the router did not answer a prompt of {len(prompt)} tokens for {model}: {error}"
                return Probe(model=model, error=said)
            turns.append(_turn(generated.meta_info, answer.headers, time.monotonic() - started_s))
            more = [dice.randrange(LEAST_TOKEN, LAST_TOKEN) for _ in range(7)]
            prompt = [*prompt, *generated.output_ids, *more]
    return Probe(model=model, page_size=page_size, turns=tuple(turns))


def _turn(meta: _Meta, headers: httpx.Headers, seconds: float) -> Turn:
    prefill = headers.get(PREFILL_CACHED_HEADER.decode())
    return Turn(
        prompt_tokens=meta.prompt_tokens,
        prefill=None if prefill is None else parse_cached(prefill),
        decode=parse_cached(headers.get(CACHED_HEADER.decode(), "")),
        plan=headers.get("x-pdserve-plan", ""),
        seconds=seconds,
    )
