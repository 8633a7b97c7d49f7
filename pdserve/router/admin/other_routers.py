"""The other routers of a cluster, and what each counts: one view over all of them.

Others are those of `admin.routers`, and those that etcd names: a router with `admin.advertise` keeps a key
there, as workers do. Each is asked at its admin port, with the admin key, which all routers have in common.
One that does not answer in time is told of, and left out.

Several addresses may lead to one router, or to this one. So each says who it is, and counts once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from pdserve.discovery.etcd import EtcdMember, EtcdMembership
from pdserve.discovery.workers import ROUTERS, member_of
from pdserve.router.admin.live_frames import Problem
from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.snapshot import Snapshot
from pdserve.router.metrics.stats import BUCKETS_S
from pdserve.router.tenants.api_keys import admin_key, cluster_token
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.0
MAX_ROUTERS: Final = 256
MAX_FIGURES_BYTES: Final = 16 << 20
FIGURES: Final = "/figures"
CONTENT_TYPE: Final = "application/msgpack"
RETRY_S: Final = 1.0


class Figures(msgspec.Struct):
    """What a router tells of itself, all its processes together. Fields are only added, with defaults."""

    router: str
    """No other router's, and another one after a restart."""
    name: str
    """For people."""
    metrics: Snapshot
    problems: list[Problem] = []


class Silent(msgspec.Struct, frozen=True):
    """A router that did not answer."""

    name: str
    error: str


encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Figures)


class OtherRouters:
    """Asks them. Make it inside the running loop, and close it. The constructor raises ConfigError."""

    def __init__(self, config: RouterConfig) -> None:
        admin = config.admin
        self.router = secrets.token_hex(12)
        """Who this router is."""
        self.name = urlsplit(admin.advertise).netloc or "this router"
        self._listed = admin.routers
        self._found: list[str] = []
        self._certificates = Certificates(admin.tls)
        self._system: ssl.SSLContext | None = None
        self._key = admin_key(admin)
        self._membership: EtcdMembership | None = None
        if config.etcd.endpoints and admin.advertise:
            self._membership = EtcdMembership(
                config.etcd,
                config.etcd.cluster,
                member_of("router", admin.advertise, "admin.advertise"),
                self._follow,
                kind=ROUTERS,
                secret=cluster_token(config.access),
            )
        self._following: asyncio.Task[None] | None = None
        if self._membership is not None:
            self._following = asyncio.create_task(self._keep(self._membership), name="router-routers")

    def _follow(self, members: list[EtcdMember]) -> None:
        self._found = [member.address for member in members]

    async def _keep(self, membership: EtcdMembership) -> None:
        while True:
            try:
                await membership.run()
            except Exception:  # boundary: a background task; the view would lose routers that serve
                logger.exception("following the routers in etcd failed, and is repeated")
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Take this router's key out of etcd."""
        if self._following is not None and self._membership is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            await self._membership.close()

    def _tls(self, urls: Sequence[str]) -> ssl.SSLContext | bool:
        """To read the system's authorities takes long, so that is done once, and only for https."""
        if (own := self._certificates.client_context) is not None:
            return own
        if self._system is None and any(url.startswith("https:") for url in urls):
            self._system = ssl.create_default_context()
        return self._system or False

    async def ask(self) -> list[Figures | Silent]:
        """What each other router says, by name. None twice, and not this one."""
        urls = list(dict.fromkeys(url.rstrip("/") for url in (*self._listed, *self._found)))[:MAX_ROUTERS]
        if not urls:
            return []
        async with httpx.AsyncClient(
            headers={"authorization": f"Bearer {self._key}"},
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=self._tls(urls),
        ) as client:
            answers = await asyncio.gather(*(_ask(client, url) for url in urls))
        return _once(answers, self.router)


async def _ask(client: httpx.AsyncClient, url: str) -> Figures | Silent:
    name = urlsplit(url).netloc or url
    try:
        async with asyncio.timeout(TIMEOUT_S), client.stream("GET", url + FIGURES) as answer:
            if answer.status_code != httpx.codes.OK:
                return Silent(name, f"status {answer.status_code}")
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_FIGURES_BYTES:
                    return Silent(name, "it says too much")
        figures = _decoder.decode(body)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
        return Silent(name, str(error) or type(error).__name__)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Silent(name, "it is another version of pdserve")
    histograms = (one for of in figures.metrics.histograms.values() for one in of.values())
    if any(len(one.counts) != len(BUCKETS_S) + 1 for one in histograms):
        return Silent(name, "it is another version of pdserve")
    figures.name = name
    return figures


def _once(answers: Sequence[Figures | Silent], own: str) -> list[Figures | Silent]:
    found: dict[str, Figures | Silent] = {}
    for answer in answers:
        who = answer.router if isinstance(answer, Figures) else answer.name
        if who != own:
            found.setdefault(who, answer)
    return sorted(found.values(), key=lambda one: one.name)
