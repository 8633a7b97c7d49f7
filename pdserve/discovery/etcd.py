"""Discovery through etcd: pool nodes find seeds, clients find nodes, routers find workers (workers.py).

Each member keeps a key `/pdserve/<cluster>/<kind>/<name>` with its address, under a lease that it renews, and
watches the keys of the others. etcd only names members. Pool nodes decide among themselves which of them are
alive (kvpool/cluster), and routers probe workers. So while etcd is down, or after it lost its data, all go on
with the members they know, and the members write their keys again.

Whoever may write to etcd could name any address, and its readers would send tokens and prompts there. So
members with a common secret sign their entries, and entries without their signature are passed over. The
signature covers the whole key, so an entry is good for one name and role. An old entry stays good: an address
that belonged to a member must not be given to strangers.

`EtcdClient` speaks etcd's JSON gateway (https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/): keys and
values in base64, 64-bit numbers as strings, a watch as one line of JSON per answer.
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
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import msgspec

from pdserve.discovery.config import EtcdConfig
from pdserve.errors import ConfigError, PoolError, PoolRefused, PoolUnavailable
from pdserve.security.tokens import given_secret

logger = logging.getLogger(__name__)

LEASE_S = 5
"""A key ends when its owner has not renewed it for this long."""
RENEWALS: Final = 3  # per lease
TIMEOUT_S = 2.0
"""Longest time of one request to one endpoint."""
RETRY_S = 1.0
"""Pause before etcd is tried again after a failure."""
MAX_NODES: Final = 20_000
PAGE_KEYS: Final = 1000  # read at once: each page has the time of a request
MAX_NAME_CHARS: Final = 512
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


class _Answer(msgspec.Struct, frozen=True):
    """Of etcd, to whatever was asked; what it does not tell has its default."""

    header: _Header = _Header()
    kvs: list[_KeyValue] = []
    more: bool = False
    ID: int = 0
    TTL: int = 0
    token: str = ""
    events: list[_Event] = []
    canceled: bool = False
    result: _Answer | None = None
    """Of a line of a stream; None: it has ended, or failed."""


class EtcdClient:
    """Requests to the endpoints in turn, the last good one first. Whoever made it must `close` it."""

    def __init__(self, config: EtcdConfig) -> None:
        """Connects at the first request. Raises ConfigError: a file holds no certificate."""
        self._config = config
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, verify=_verify(config), trust_env=False)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, and one lease has many
        self.endpoint = 0
        """Counts the endpoints that have been tried."""
        self.token = ""
        """Of our user; empty: the next request asks for one."""

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, path: str, body: Mapping[str, Any]) -> _Answer:
        """Raises PoolUnavailable: no endpoint answers in time; PoolRefused: etcd says no."""
        problem = "no endpoints are given"
        for _ in self._config.endpoints:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._post(path, body)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, PoolUnavailable) as error:  # TimeoutError too
                problem = f"{self._url('')}: {_words(error)}"
                self.endpoint += 1
                self.token = ""
            except PoolRefused:
                self.token = ""
                raise
        raise PoolUnavailable(f"etcd: {problem}")

    async def entries(self, prefix: str) -> tuple[list[_KeyValue], int]:
        """All keys that begin so, as of one revision, and which. Raises PoolError."""
        body: dict[str, str] = {**_range(prefix), "limit": str(PAGE_KEYS)}
        kvs: list[_KeyValue] = []
        while True:
            page = await self.ask("kv/range", body)
            if not page.header.revision:
                raise PoolUnavailable(f"{self._url('')}: an answer that is not etcd's")
            body.setdefault("revision", str(page.header.revision))
            kvs += page.kvs
            if not page.more or not page.kvs or len(kvs) >= MAX_NODES:
                return kvs, int(body["revision"])
            body["key"] = _b64(base64.b64decode(page.kvs[-1].key) + b"\0")

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[_Event]:
        """What happens to keys that begin so, from this revision on. It has no time-out: that etcd lives is
        for the caller to ask. Raises PoolUnavailable, at its end too.
        """
        body = {"create_request": {**_range(prefix), "start_revision": str(revision)}}
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        try:
            async with self._http.stream(
                "POST", self._url("watch"), json=body, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise PoolUnavailable(f"etcd: watch: status {answer.status_code}")
                async for line in answer.aiter_lines():
                    told = _parsed(line).result if line.strip() else _Answer()
                    if told is None or told.canceled:
                        raise PoolUnavailable(f"etcd ended the watch: {line[:200]}")
                    for event in told.events:
                        yield event
        except (httpx.HTTPError, OSError) as error:  # a refused certificate is an ssl.SSLError
            raise PoolUnavailable(f"etcd: {self._url('')}: {_words(error)}") from error
        raise PoolUnavailable("etcd ended the watch")

    async def _post(self, path: str, body: Mapping[str, Any]) -> _Answer:
        for is_last in (False, True):
            if self._config.username and not self.token:
                credentials = _credentials(self._config)
                given = await self._http.post(self._url("auth/authenticate"), json=credentials)
                self.token = _decoded(given).token
            answer = await self._http.post(self._url(path), json=body, headers=self._headers())
            if is_last or not _wants_new_token(answer):
                break
            self.token = ""
        return _decoded(answer)

    def _url(self, path: str) -> str:
        endpoints = self._config.endpoints
        return f"{endpoints[self.endpoint % len(endpoints)].rstrip('/')}/v3/{path}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self.token} if self.token else {}


def discover(config: EtcdConfig, cluster: str) -> list[EtcdMember]:
    """The nodes of a pool that etcd knows of now, by name. For clients; blocks for at most `TIMEOUT_S` per
    endpoint, also where an event loop runs. Signatures are not looked at: they are for nodes, and a client
    with a token lets each node prove itself.

    Raises PoolUnavailable: no endpoint answers; PoolRefused: etcd says no; ConfigError: no certificates.
    """

    async def ask() -> list[EtcdMember]:
        client, prefix = EtcdClient(config), _prefix(cluster, NODES)
        try:
            kvs, _ = await client.entries(prefix)
        except PoolUnavailable as error:
            raise PoolUnavailable(f"etcd cannot be asked for the pool's nodes: {error}") from error
        finally:
            await client.close()
        return _members(kvs, prefix, "")[0]  # what is no member is logged by those who stay

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(ask())).result()


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
        self.client: Final = EtcdClient(config)
        self._prefix = _prefix(cluster, kind)
        self._node = node
        self._own = "" if node is None else node.node
        self._who = f"{kind.removesuffix('s')} {self._own}" if self._own else f"who watches {kind}"
        self._found = found
        self._secret = secret
        self._watched = self._prefix + (self._own if alone else "")
        self._passed_over: set[str] = set()  # names of entries that were logged
        self._lease = 0
        self._said = ""  # of what is wrong, until it is right again
        self._nodes: dict[str, EtcdMember] = {}
        self._missing: dict[str, asyncio.TimerHandle] = {}
        """Of `_nodes`, those whose keys a failure of etcd lost: each goes when its timer fires."""

    async def nodes(self) -> list[EtcdMember]:
        """The nodes that have a key now. Raises PoolError."""
        return self._read((await self.client.entries(self._watched))[0])

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
            await asyncio.sleep(RETRY_S)

    async def close(self, *, keeps_key: bool = False) -> None:
        """Take the key away, after `run` was cancelled. `keeps_key`: leave it there until its lease ends, or
        it is written again.
        """
        for timer in self._missing.values():
            timer.cancel()
        if self._lease and not keeps_key:
            with contextlib.suppress(PoolError):
                await self.client.ask("lease/revoke", {"ID": str(self._lease)})
        await self.client.close()

    async def _session(self) -> None:
        """From a new lease until something fails. Raises a group of PoolErrors."""
        async with asyncio.TaskGroup() as tasks:
            lease = None if self._node is None else await self._register(self._node)
            kvs, revision = await self.client.entries(self._watched)
            self._said = ""
            listed = self._read(kvs)
            names = {node.node for node in listed}
            for name in self._nodes.keys() - names - self._missing.keys():
                patience_s = LEASE_S + 2 * RETRY_S
                self._missing[name] = asyncio.get_running_loop().call_later(patience_s, self._drop, name)
            self._put(listed)
            if self._own and self._own not in names:
                raise PoolUnavailable("somebody deleted this node's key")
            tasks.create_task(self._renew(lease, self.client.endpoint))
            async with contextlib.aclosing(self.client.watch(self._watched, revision + 1)) as events:
                async for event in events:
                    self._happened(event)

    async def _register(self, node: EtcdMember) -> _Answer:
        lease = await self.client.ask("lease/grant", {"TTL": str(LEASE_S)})
        self._lease = lease.ID
        signature = _signature(self._secret, self._prefix + node.node, node.address, node.weight)
        value = msgspec.json.encode(_Entry(node.address, node.weight, signature))
        put = {"key": _b64(self._prefix + node.node), "value": _b64(value), "lease": str(lease.ID)}
        await self.client.ask("kv/put", put)
        return lease

    async def _renew(self, lease: _Answer | None, endpoint: int) -> None:
        """Also watches the watch's endpoint: one that hangs, or whose host vanished, ends no stream. Without
        a lease that is all.
        """
        while True:
            await asyncio.sleep((LEASE_S if lease is None else lease.TTL) / RENEWALS)
            if lease is None:
                count = {**_range(self._watched), "count_only": True}
                await self.client.ask("kv/range", count)
            else:
                line = await self.client.ask("lease/keepalive", {"ID": str(lease.ID)})
                if line.result is None or line.result.TTL <= 0:
                    raise PoolUnavailable("the node's lease ended")
            if self.client.endpoint != endpoint:
                raise PoolUnavailable("etcd: an endpoint answers no more; the watch goes on at another")

    def _happened(self, event: _Event) -> None:
        """Raises PoolUnavailable when this node must write its key anew."""
        name = _name(event.kv.key, self._prefix)
        written = [] if event.type == "DELETE" else self._read([event.kv])
        if self._own == name and written != [self._node]:
            raise PoolUnavailable("somebody deleted or overwrote this node's key")
        if event.type == "DELETE":
            self._drop(name)
        elif written:
            self._put(written)

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

    def _read(self, kvs: Iterable[_KeyValue]) -> list[EtcdMember]:
        """What others wrote under the prefix and is no member is passed over, with one line in the log."""
        found, problems = _members(kvs, self._prefix, self._secret)
        for name, problem in problems.items():
            if name not in self._passed_over and len(self._passed_over) < MAX_NODES:
                self._passed_over.add(name)
                logger.warning("etcd: %s%s is passed over: %s", self._prefix, name, problem)
        return found


def _prefix(cluster: str, kind: str) -> str:
    return f"/pdserve/{cluster}/{kind}/"


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
            problems[name] = "it is not signed with our token: another token, or a stranger"
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
    stale = answer.status_code == httpx.codes.BAD_REQUEST and any(one in answer.text for one in STALE_TOKEN)
    return stale or answer.status_code == httpx.codes.UNAUTHORIZED


def _verify(config: EtcdConfig) -> ssl.SSLContext | bool:
    """Raises ConfigError."""
    if not (config.ca_file or config.certificate_file):
        return True
    what = f"etcd.ca_file {config.ca_file} holds no certificates"
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        what = f"etcd.certificate_file {config.certificate_file} and etcd.key_file"
        if config.certificate_file:
            context.load_cert_chain(config.certificate_file, config.key_file or None)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"{what}: {error}") from error
    return context


def _decoded(answer: httpx.Response) -> _Answer:
    """Raises PoolUnavailable, PoolRefused."""
    code, says = answer.status_code, f"status {answer.status_code}: {answer.text[:200].strip()}"
    if answer.is_server_error or answer.is_redirect or code == httpx.codes.UNAUTHORIZED:
        raise PoolUnavailable(says)
    if code != httpx.codes.OK:
        raise PoolRefused(f"etcd says: {says}")
    return _parsed(answer.content)


def _parsed(text: str | bytes) -> _Answer:
    try:
        return msgspec.json.decode(text, type=_Answer, strict=False)  # 64-bit numbers come as strings
    except msgspec.MsgspecError as error:
        raise PoolUnavailable(f"an answer that is not etcd's: {error}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _first(group: BaseExceptionGroup[PoolError]) -> PoolError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
