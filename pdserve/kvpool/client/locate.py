"""Where a worker finds the pool: the nodes in its configuration, or the nodes registered in etcd.

It asks once, at the worker's start. From then on the nodes' own views say which nodes there are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from pdserve.discovery.config import EtcdConfig
from pdserve.discovery.etcd import discover
from pdserve.errors import PoolError, StartupError
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef

logger = logging.getLogger(__name__)

POLL_S = 0.5


def locate_pool(config: PoolClientConfig, *, sleep: Callable[[float], None] = time.sleep) -> PoolClientConfig:
    """The configuration with its nodes, and without etcd's password, which nobody needs from here on.

    Waits for at most `etcd_wait_s` beyond the last question. Raises StartupError: etcd cannot be asked, or
    knows no node of the pool.
    """
    if config.nodes or not config.etcd.endpoints:
        return replace(config, etcd=EtcdConfig())
    until_s = time.monotonic() + config.etcd_wait_s
    waited = False
    while True:
        problem = f"it knows no node of the pool '{config.cluster}': start one, or set pool.cluster"
        try:
            nodes = discover(config.etcd, config.cluster)
            if nodes:
                refs = [PoolNodeRef(node=n.node, address=n.address, weight=n.weight) for n in nodes]
                return replace(config, nodes=refs, etcd=EtcdConfig())
        except PoolError as error:
            problem = str(error)
        if time.monotonic() >= until_s:
            raise StartupError(f"pool.etcd ({', '.join(config.etcd.endpoints)}): {problem}")
        if not waited:
            waited = True
            logger.info("waiting for the pool: %s", problem)
        sleep(POLL_S)
