"""Workers in etcd: each keeps a key `<prefix>/<cluster>/workers/<role>/<host:port>` with its URL, under a
lease that it renews; routers watch them (pdserve/router/fleet/discovery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from urllib.parse import urlsplit

from pdserve.discovery import etcd
from pdserve.discovery.config import WORKERS, WorkerEtcdConfig
from pdserve.discovery.etcd import EtcdMember, EtcdMembership
from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)


def worker_key(role: str, url: str) -> EtcdMember:
    """What a worker writes. Raises ConfigError for a URL that no router could use."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"advertise: {url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    if parts.hostname in ("0.0.0.0", "::"):
        raise ConfigError(f"advertise is needed: {url} is no address that a router can connect to")
    return EtcdMember(f"{role}/{parts.netloc}", url, 1)


class Registration:
    """A worker's key, kept by a thread of its own from `start` to `stop`."""

    def __init__(self, config: WorkerEtcdConfig, role: str, url: str, cluster_token: str) -> None:
        """`cluster_token` signs the key. Raises ConfigError."""
        self._membership = EtcdMembership(
            config,
            config.cluster,
            worker_key(role, url),
            lambda _: None,
            kind=WORKERS,
            secret=cluster_token,
            alone=True,
        )
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._keep()), name="worker-etcd", daemon=True
        )

    def start(self) -> None:
        """The worker is ready."""
        self._thread.start()

    def stop(self) -> None:
        """The worker ends: its key goes. Takes as long as etcd may, or the lease does it later."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()
        self._loop.close()

    async def _keep(self) -> None:
        keeping = asyncio.create_task(self._run_membership())
        await self._stopped.wait()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await self._membership.close()

    async def _run_membership(self) -> None:
        while True:
            try:
                await self._membership.run()
            except Exception:  # boundary: of this thread; routers would lose a worker that serves
                logger.exception("worker: keeping its key in etcd failed, and is repeated")
            await asyncio.sleep(etcd.RETRY_S)
