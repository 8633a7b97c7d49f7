"""Discovery of workers as pods of Kubernetes: list them by label, then watch, by HTTP.

    list ──► watch from the list's version ──ended, broken, silent──► watch again from the last version
      ▲                    │
      └──── version too old (410), or a line that cannot be read ──┘

The protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes.
A list comes in pages. A watch is a line of JSON for each change; bookmarks only move the version on. The API
server ends each watch after `watch_s`. One that does not end soon after is taken for dead, so a connection
whose other end vanished is noticed.

Who may make or label pods in the namespace names workers, and gets prompts and the cluster token. Kubernetes
itself bounds who that is (RBAC), so there is no signature as in etcd.

A list and a stream of lines need no client library: httpx, with a bound for each answer and each line.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote, urlsplit

import httpx

from pdserve.discovery.config import KubernetesConfig
from pdserve.discovery.pods import (
    GONE,
    ApiStatus,
    Change,
    FoundPod,
    Named,
    PodPage,
    PodReader,
    Scheme,
    parsed,
    reason,
    shown,
)
from pdserve.errors import ConfigError, DiscoveryError
from pdserve.tokens import read_token

logger = logging.getLogger(__name__)

PAGE_PODS: Final = 500
MAX_PODS: Final = 20_000
MAX_PAGE_BYTES: Final = 64 << 20
MAX_LINE_BYTES: Final = 4 << 20  # an object in Kubernetes has at most 1.5 MiB
LIST_TIMEOUTS: Final = 4  # a list of many pages may take this many times the time of one request


class _TooOld(Exception):
    """The API server cannot go on from this version: list again."""


class PodWatch:
    """The workers' pods, kept current. `changed` gets all of them after every change, in the loop."""

    def __init__(
        self,
        config: KubernetesConfig,
        changed: Callable[[list[FoundPod]], None],
        environ: Mapping[str, str],
        scheme: Scheme = "http",
    ) -> None:
        """`scheme`: of the workers' URLs. Raises ConfigError: no API server, namespace or certificates."""
        self._config = config
        self._changed = changed
        self._reader = PodReader(config, scheme, self._pass_over)
        self._url = f"{_api(config, environ)}/api/v1/namespaces/{quote(_namespace(config), safe='')}/pods"
        self._pods: dict[str, FoundPod] = {}
        self._version = ""
        """Of the last list or change; empty: list first."""
        self._passed_over: dict[str, str] = {}
        self._said = ""
        self._client = httpx.AsyncClient(
            verify=_verify(config, self._url), trust_env=False, follow_redirects=False
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

    async def list(self) -> None:
        """Read all pods once. Raises DiscoveryError."""
        pods: dict[str, FoundPod] = {}
        rest = ""
        try:
            async with asyncio.timeout(LIST_TIMEOUTS * self._config.timeout_s):
                while True:
                    page = await self._page(rest)
                    found = filter(None, map(self._reader.read, page.items or ()))
                    pods |= {pod.name: pod for pod in found}
                    if len(pods) > MAX_PODS:
                        raise DiscoveryError(f"more than {MAX_PODS} pods match {self._config.selector!r}")
                    rest = page.metadata.rest
                    if not rest:
                        break
        except TimeoutError:
            raise DiscoveryError(f"{self._url}: the list of pods did not come in time") from None
        except _TooOld:
            raise DiscoveryError(f"{self._url}: the list of pods changed while it was read") from None
        self._version, self._pods = page.metadata.version, pods
        self._changed(list(pods.values()))

    async def run(self) -> None:
        """Follow the pods until cancelled, through every failure of the API server."""
        while True:
            try:
                if not self._version:
                    await self.list()
                await self._watch()
                self._said = ""
                continue  # it ended as agreed
            except _TooOld:
                self._version = ""
                problem = "the API server forgot where the watch was; listing the pods again"
                logger.info(problem)
            except DiscoveryError as error:
                if str(error) != self._said:  # once, not every second
                    logger.warning("going on with the workers that are known: %s", error)
                    self._said = str(error)
            await asyncio.sleep(self._config.retry_s)

    async def close(self) -> None:
        """Close the connections; after `run` was cancelled."""
        await self._client.aclose()

    async def _page(self, rest: str) -> PodPage:
        params = {"labelSelector": self._config.selector, "limit": str(PAGE_PODS)}
        body = b""
        async with self._asking(params | ({"continue": rest} if rest else {}), self._config.timeout_s) as got:
            async for piece in got.aiter_bytes():
                body += piece
                if len(body) > MAX_PAGE_BYTES:
                    raise DiscoveryError(f"{self._url}: a page of pods has more than {MAX_PAGE_BYTES} bytes")
        return parsed(body, PodPage)

    async def _watch(self) -> None:
        """Follow changes until the API server ends the watch. Raises DiscoveryError, _TooOld."""
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": self._config.selector,
            "resourceVersion": self._version,
            "timeoutSeconds": str(self._config.watch_s),
        }
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with (
                asyncio.timeout(self._config.watch_s + self._config.timeout_s),
                self._asking(params, silence_s=None) as answer,
            ):
                rest = b""
                async for piece in answer.aiter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(bytes.strip, lines):
                        self._happened(line)
                    if len(rest) > MAX_LINE_BYTES:
                        self._version = ""  # what this line would say is lost
                        raise DiscoveryError(f"a change of a pod has more than {MAX_LINE_BYTES} bytes")
        except TimeoutError:
            raise DiscoveryError(f"{self._url}: the watch did not end when it should") from None
        if loop.time() - began_s < min(self._config.retry_s, self._config.watch_s):
            raise DiscoveryError(f"{self._url}: the watch ended at once")  # not to ask without a pause

    def _happened(self, line: bytes) -> None:
        """One change. Raises DiscoveryError, _TooOld."""
        try:
            change = parsed(line, Change)
            if change.type == "ERROR":
                status = parsed(change.object, ApiStatus)
                if status.code == GONE:
                    raise _TooOld
                raise DiscoveryError(f"the API server ended the watch: {shown(status.message)}")
            about = parsed(change.object, Named).metadata
        except DiscoveryError:
            self._version = ""  # what this line says is lost: list again
            raise
        self._version = about.resource_version or self._version
        if change.type not in ("ADDED", "MODIFIED", "DELETED"):
            return  # a bookmark, or of a later API
        found = None if change.type == "DELETED" else self._reader.read(change.object)
        if found == self._pods.get(about.name):
            return
        if found is None:
            del self._pods[about.name]
        elif about.name not in self._pods and len(self._pods) >= MAX_PODS:
            self._pass_over(about.name, f"more than {MAX_PODS} pods match")
            return
        else:
            self._pods[about.name] = found
        self._changed(list(self._pods.values()))

    def _pass_over(self, name: str, why: str) -> None:
        if self._passed_over.get(name) != why and len(self._passed_over) < MAX_PODS:
            self._passed_over[name] = why
            logger.warning("pod %s is passed over: %s", shown(name), shown(why))

    @asynccontextmanager
    async def _asking(
        self, params: Mapping[str, str], silence_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        """An answer with status 200, its body to be read. `silence_s`: longest time between two pieces of
        it; None: the caller's own bound. Raises DiscoveryError, _TooOld.
        """
        timeout = httpx.Timeout(self._config.timeout_s, read=silence_s)
        try:
            headers = {"Authorization": f"Bearer {read_token(self._config.token_file)}"}
            async with self._client.stream(
                "GET", self._url, params=params, headers=headers, timeout=timeout
            ) as answer:
                if answer.status_code == GONE:
                    raise _TooOld
                if answer.status_code != httpx.codes.OK:
                    said = reason(await _beginning(answer))
                    raise DiscoveryError(f"{self._url}: status {answer.status_code}: {said}")
                yield answer
        except httpx.HTTPError as error:
            raise DiscoveryError(f"{self._url}: {shown(str(error) or type(error).__name__)}") from None
        except ConfigError as error:
            raise DiscoveryError(f"kubernetes.token_file: {error}") from None


async def _beginning(answer: httpx.Response) -> bytes:
    body = b""
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > MAX_LINE_BYTES:
            break
    return body


def _api(config: KubernetesConfig, environ: Mapping[str, str]) -> str:
    """The API server's URL. Raises ConfigError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not config.api and not host:
        raise ConfigError("kubernetes.selector is set outside of Kubernetes: give kubernetes.api, too")
    url = config.api or f"https://{f'[{host}]' if ':' in host else host}:{port}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"kubernetes.api: {url!r} is not of the form https://HOST:PORT")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigError(f"kubernetes.api: {url} has no TLS: who is on the wire would read the token")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _namespace(config: KubernetesConfig) -> str:
    """Raises ConfigError."""
    if config.namespace:
        return config.namespace
    try:
        return (config.token_file.parent / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError("kubernetes.namespace is needed: this pod's own is not known") from None


def _verify(config: KubernetesConfig, url: str) -> ssl.SSLContext | bool:
    """Raises ConfigError."""
    if url.startswith("http:"):
        return False
    try:
        return ssl.create_default_context(cafile=str(config.ca_file))
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"kubernetes.ca_file {config.ca_file} holds no certificates: {error}") from None
