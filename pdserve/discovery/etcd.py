"""Discovery through etcd: pool nodes find seeds, clients find nodes, routers find workers (workers.py).

Each member keeps a key `<prefix>/<cluster>/<kind>/<name>` with its address, under a lease that it renews, and
watches the keys of the others. etcd only names members. Pool nodes decide among themselves which of them are
alive (kvpool/cluster), and routers probe workers. So while etcd is down, or after it lost its data, all go on
with the members they know, and the members write their keys again.

Whoever may write to etcd could name any address, and its readers would send tokens and prompts there. So
members with a common secret sign their entries, and entries without their signature are passed over. The
signature covers the whole key, so an entry is good for one name and role. An old entry stays good: an address
that belonged to a member must not be given to strangers.

This speaks etcd's JSON gateway (https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/): keys and values in
base64, 64-bit numbers as strings, a watch as one line of JSON per answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import httpx
import msgspec

from pdserve.discovery.config import EtcdConfig
from pdserve.errors import ConfigError, PoolError, PoolRefused, PoolUnavailable
from pdserve.security.tokens import given_secret

logger = logging.getLogger(__name__)
T = TypeVar("T")

RENEWALS: Final = 3  # per lease
MAX_NODES: Final = 20_000
PAGE_KEYS: Final = 1000  # read at once: each page has the time of a request
MAX_NAME_CHARS: Final = 512
REAUTHENTICATE: Final = 401
STALE_TOKEN: Final = ("revision of auth store is old", "user name is empty")  # with 400: users were changed
NODES: Final = "nodes"


class EtcdMember(msgspec.Struct, frozen=True):
    """A member of a cluster that has a key in etcd: a pool node or a worker."""

    node: str
    """The key's last part: the node's name, or `role/host:port` of a worker."""
    address: str
    """Where it is reached: `unix:/path`, `tcp:host:port`, or a worker's URL."""
    weight: int = 1
    """Share of the hash ring. Workers have 1."""


class _Entry(msgspec.Struct, frozen=True):
    """The value of a member's key, in JSON."""

    address: str
    weight: int = 1
    signature: str = ""
    """HMAC-SHA256 in hex, where the members have a secret."""


class _KeyValue(msgspec.Struct, frozen=True):
    key: str
    value: str = ""


class _Event(msgspec.Struct, frozen=True):
    kv: _KeyValue
    type: str = "PUT"


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0


class _Range(msgspec.Struct, frozen=True):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Watch(msgspec.Struct, frozen=True):
    events: list[_Event] = []
    canceled: bool = False


class _WatchLine(msgspec.Struct, frozen=True):
    result: _Watch | None = None
    error: Any = None


class _Lease(msgspec.Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class _LeaseLine(msgspec.Struct, frozen=True):
    result: _Lease


class _Token(msgspec.Struct, frozen=True):
    token: str


def discover(config: EtcdConfig, cluster: str) -> list[EtcdMember]:
    """The nodes of a pool that etcd knows of now, by name. For clients; blocks for at most `timeout_s` per
    endpoint, also where an event loop runs. Signatures are not looked at: they are for nodes, and a client
    with a token lets each node prove itself.

    Raises PoolUnavailable: no endpoint answers; PoolRefused: etcd says no; ConfigError: no certificates.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(_discover(config, cluster))).result()


async def _discover(config: EtcdConfig, cluster: str) -> list[EtcdMember]:
    membership = EtcdMembership(config, cluster, None, lambda _: None)
    try:
        kvs, _ = await membership._list()
        found, _ = _members(kvs, membership._prefix, "")  # what is no member is logged by those who stay
        return found
    except PoolUnavailable as error:
        raise PoolUnavailable(f"etcd cannot be asked for the pool's nodes: {error}") from error
    finally:
        await membership.close()


class EtcdMembership:
    """A member's key, and the keys of the others, of which `found` is told, in the loop. Without a member of
    its own it watches only.
    """

    def __init__(
        self,
        config: EtcdConfig,
        cluster: str,
        node: EtcdMember | None,
        found: Callable[[list[EtcdMember]], None],
        *,
        kind: str = NODES,
        secret: str = "",
        alone: bool = False,
    ) -> None:
        """`secret`: of all members; entries without its signature are passed over. `alone`: only the member's
        own key is watched, because nobody here wants the others'.

        `found` gets all members that have a key, after every change. A member whose key is missing when etcd
        is back after a failure counts for the time of a lease and a little more, in which it writes it again.
        """
        self._config = config
        self._prefix = _prefix(config, cluster, kind)
        self._node = node
        self._who = f"{kind.removesuffix('s')} {node.node}" if node is not None else f"who watches {kind}"
        self._found = found
        self._secret = secret
        self._watched = self._prefix + (node.node if alone and node is not None else "")
        self._passed_over: set[str] = set()  # names of entries that were logged
        self._client = httpx.AsyncClient(
            timeout=config.timeout_s, verify=_verify(config), trust_env=False, follow_redirects=False
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, and one lease has many
        self._endpoint = 0
        self._token = ""
        self._lease = 0
        self._said = ""  # of what is wrong, until it is right again
        self._nodes: dict[str, EtcdMember] = {}
        self._missing: dict[str, asyncio.TimerHandle] = {}
        """Of `_nodes`, those whose keys a failure of etcd lost: each goes when its timer fires."""

    async def nodes(self) -> list[EtcdMember]:
        """The nodes that have a key now. Raises PoolError."""
        kvs, _ = await self._list()
        return self._read(kvs)

    async def run(self) -> None:
        """Keep the key and watch the others', until cancelled; through every failure of etcd."""
        while True:
            try:
                await self._session()
            except* PoolError as group:
                problem = str(_first(group))
                if problem != self._said:  # once, not every second
                    logger.warning("%s: going on without etcd: %s", self._who, problem)
                    self._said = problem
            await asyncio.sleep(self._config.retry_s)

    async def close(self, *, keeps_key: bool = False) -> None:
        """Take the key away, after `run` was cancelled. `keeps_key`: leave it there until its lease ends, or
        it is written again.
        """
        for timer in self._missing.values():
            timer.cancel()
        if self._lease and not keeps_key:
            with contextlib.suppress(PoolError):
                await self._ask("lease/revoke", {"ID": str(self._lease)}, msgspec.Raw)
        await self._client.aclose()

    async def _session(self) -> None:
        """From a new lease until something fails. Raises a group of PoolErrors."""
        async with asyncio.TaskGroup() as tasks:
            lease = None if self._node is None else await self._register(self._node)
            known, revision = await self._list()
            self._said = ""
            listed = self._read(known)
            self._listed(listed)
            if self._node is not None and self._node.node not in {node.node for node in listed}:
                raise PoolUnavailable("somebody deleted this node's key")
            tasks.create_task(self._renew(lease, self._endpoint))
            tasks.create_task(self._watch(revision + 1))

    def _listed(self, nodes: list[EtcdMember]) -> None:
        """These are all that have a key, after the start or a failure."""
        loop = asyncio.get_running_loop()
        patience_s = self._config.lease_s + 2 * self._config.retry_s
        for name in self._nodes.keys() - {node.node for node in nodes} - self._missing.keys():
            self._missing[name] = loop.call_later(patience_s, self._drop, name)
        self._put(nodes)

    def _put(self, nodes: list[EtcdMember]) -> None:
        for node in nodes:
            if timer := self._missing.pop(node.node, None):
                timer.cancel()
            self._nodes[node.node] = node
        self._found(list(self._nodes.values()))

    def _drop(self, name: str) -> None:
        if timer := self._missing.pop(name, None):
            timer.cancel()
        if self._nodes.pop(name, None) is not None:
            self._found(list(self._nodes.values()))

    async def _list(self) -> tuple[list[_KeyValue], int]:
        """All keys, as of one revision, and which. Raises PoolError."""
        body: dict[str, str] = {**_range(self._watched), "limit": str(PAGE_KEYS)}
        kvs: list[_KeyValue] = []
        while True:
            page = await self._ask("kv/range", body, _Range)
            body.setdefault("revision", str(page.header.revision))
            kvs += page.kvs
            if not page.more or not page.kvs or len(kvs) >= MAX_NODES:
                return kvs, int(body["revision"])
            body["key"] = _b64(base64.b64decode(page.kvs[-1].key) + b"\0")

    async def _register(self, node: EtcdMember) -> _Lease:
        lease = await self._ask("lease/grant", {"TTL": str(self._config.lease_s)}, _Lease)
        self._lease = lease.ID
        signature = _signature(self._secret, self._prefix + node.node, node.address, node.weight)
        value = msgspec.json.encode(_Entry(node.address, node.weight, signature))
        put = {"key": _b64(self._prefix + node.node), "value": _b64(value), "lease": str(lease.ID)}
        await self._ask("kv/put", put, msgspec.Raw)
        return lease

    async def _renew(self, lease: _Lease | None, endpoint: int) -> None:
        """Also watches the watch's endpoint: one that hangs, or whose host vanished, ends no stream. Without
        a lease that is all.
        """
        while True:
            await asyncio.sleep((self._config.lease_s if lease is None else lease.TTL) / RENEWALS)
            if lease is None:
                await self._ask("kv/range", {**_range(self._watched), "count_only": True}, msgspec.Raw)
            else:
                line = await self._ask("lease/keepalive", {"ID": str(lease.ID)}, _LeaseLine)
                if line.result.TTL <= 0:
                    raise PoolUnavailable("the node's lease ended")
            if self._endpoint != endpoint:
                raise PoolUnavailable("etcd: an endpoint answers no more; the watch goes on at another")

    async def _watch(self, revision: int) -> None:
        body = {"create_request": {**_range(self._watched), "start_revision": str(revision)}}
        async for line in self._lines("watch", body):
            answer = _parsed(line, _WatchLine)
            if answer.error is not None or answer.result is None or answer.result.canceled:
                raise PoolUnavailable(f"etcd ended the watch: {line[:200]}")
            for event in answer.result.events:
                self._happened(event)

    def _happened(self, event: _Event) -> None:
        """Raises PoolUnavailable when this node must write its key anew."""
        name = _name(event.kv.key, self._prefix)
        if event.type == "DELETE":
            if self._node is not None and name == self._node.node:
                raise PoolUnavailable("somebody deleted this node's key")
            self._drop(name)
            return
        written = self._read([event.kv])
        if self._node is not None and name == self._node.node and written != [self._node]:
            raise PoolUnavailable("somebody overwrote this node's key")
        if written:
            self._put(written)

    def _read(self, kvs: Iterable[_KeyValue]) -> list[EtcdMember]:
        """What others wrote under the prefix and is no member is passed over, with one line in the log."""
        found, problems = _members(kvs, self._prefix, self._secret)
        for name, problem in problems.items():
            if name not in self._passed_over and len(self._passed_over) < MAX_NODES:
                self._passed_over.add(name)
                logger.warning("etcd: %s%s is passed over: %s", self._prefix, name, problem)
        return found

    async def _ask(self, path: str, body: Mapping[str, Any], type_: type[T]) -> T:
        """Ask the endpoints in turn, the last good one first. Raises PoolError."""
        problem = "no endpoints are given"
        for _ in self._config.endpoints:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await self._post(path, body, type_)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, PoolUnavailable) as error:  # TimeoutError too
                problem = f"{self._url('')}: {_words(error)}"
                self._endpoint += 1
                self._token = ""
            except PoolRefused:
                self._token = ""
                raise
        raise PoolUnavailable(f"etcd: {problem}")

    async def _post(self, path: str, body: Mapping[str, Any], type_: type[T]) -> T:
        await self._authenticate()
        answer = await self._client.post(self._url(path), json=body, headers=self._headers())
        if _wants_new_token(answer):
            self._token = ""
            await self._authenticate()
            answer = await self._client.post(self._url(path), json=body, headers=self._headers())
        return _decoded(answer, type_)

    async def _authenticate(self) -> None:
        if self._config.username and not self._token:
            answer = await self._client.post(self._url("auth/authenticate"), json=_credentials(self._config))
            self._token = _decoded(answer, _Token).token

    async def _lines(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """A stream of answers, without a time-out: that etcd lives is what renewing the lease tells."""
        timeout = httpx.Timeout(self._config.timeout_s, read=None)
        try:
            async with self._client.stream(
                "POST", self._url(path), json=body, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise PoolUnavailable(f"etcd: {path}: status {answer.status_code}")
                async for line in answer.aiter_lines():
                    if line:
                        yield line
        except (httpx.HTTPError, OSError) as error:  # a refused certificate is an ssl.SSLError
            raise PoolUnavailable(f"etcd: {self._url('')}: {_words(error)}") from error
        raise PoolUnavailable("etcd ended the watch")

    def _url(self, path: str) -> str:
        endpoints = self._config.endpoints
        return f"{endpoints[self._endpoint % len(endpoints)].rstrip('/')}/v3/{path}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}


def _prefix(config: EtcdConfig, cluster: str, kind: str) -> str:
    return f"{config.prefix.rstrip('/')}/{cluster}/{kind}/"


def _range(prefix: str) -> dict[str, str]:
    """All keys that begin with the prefix: up to it with its last byte raised, as etcd has it."""
    end = prefix.encode()
    end = end[:-1] + bytes([end[-1] + 1])
    return {"key": _b64(prefix), "range_end": _b64(end)}


def _members(kvs: Iterable[_KeyValue], prefix: str, secret: str) -> tuple[list[EtcdMember], dict[str, str]]:
    """The members by name, and what is wrong with the entries of others."""
    found, problems = [], {}
    for kv in kvs:
        name = _name(kv.key, prefix)
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:  # it would write lines of its own in our log
            problems[ascii(name[:MAX_NAME_CHARS])] = "that is no name of a member"
            continue
        try:
            entry = msgspec.json.decode(base64.b64decode(kv.value), type=_Entry)
        except (msgspec.MsgspecError, ValueError) as error:
            problems[name] = str(error)
            continue
        expected = _signature(secret, prefix + name, entry.address, entry.weight)
        if secret and not hmac.compare_digest(entry.signature.encode(), expected.encode()):
            problems[name] = "it is not signed with our token: another token, an older version, or a stranger"
            continue
        found.append(EtcdMember(name, entry.address, max(1, entry.weight)))
    return sorted(found, key=lambda member: member.node), problems


def _signature(secret: str, key: str, address: str, weight: int) -> str:
    if not secret:
        return ""
    text = msgspec.json.encode(["pdserve etcd entry", key, address, weight])
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _name(key: str, prefix: str) -> str:
    return base64.b64decode(key).decode(errors="replace").removeprefix(prefix)


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _credentials(config: EtcdConfig) -> dict[str, str]:
    password = given_secret(config.password, "PDSERVE_ETCD_PASSWORD", os.environ)
    return {"name": config.username, "password": password}


def _wants_new_token(answer: httpx.Response) -> bool:
    """Tokens end after some minutes, and signed ones (JWT) with every change of users."""
    code = answer.status_code
    stale = code == httpx.codes.BAD_REQUEST and any(words in answer.text for words in STALE_TOKEN)
    return code == REAUTHENTICATE or stale


def _verify(config: EtcdConfig) -> ssl.SSLContext | bool:
    """Raises ConfigError."""
    if not (config.ca_file or config.certificate_file):
        return True
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"etcd.ca_file {config.ca_file} holds no certificates: {error}") from error
    if config.certificate_file:
        try:
            context.load_cert_chain(config.certificate_file, config.key_file or None)
        except OSError as error:
            raise ConfigError(
                f"etcd.certificate_file {config.certificate_file} and etcd.key_file: {error}"
            ) from error
    return context


def _decoded(answer: httpx.Response, type_: type[T]) -> T:
    """Raises PoolUnavailable, PoolRefused."""
    if answer.is_server_error or answer.is_redirect or answer.status_code == REAUTHENTICATE:
        raise PoolUnavailable(f"status {answer.status_code}: {answer.text[:200].strip()}")
    if answer.status_code != httpx.codes.OK:
        raise PoolRefused(f"etcd says: status {answer.status_code}: {answer.text[:200].strip()}")
    return _parsed(answer.content, type_)


def _parsed(text: str | bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=type_, strict=False)  # 64-bit numbers come as strings
    except msgspec.MsgspecError as error:
        raise PoolUnavailable(f"an answer that is not etcd's: {error}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _first(group: BaseExceptionGroup[PoolError]) -> PoolError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
