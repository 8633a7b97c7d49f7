"""The pool's nodes for a worker: from its configuration, or from etcd.

etcd is read once, at the worker's start: one node that stays is enough, and the nearest is asked (doors.py).
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
ETCD_WAIT_S = 30.0
"""Longest wait of a worker until the first pool node is in etcd."""


def locate_pool(config: PoolClientConfig, *, sleep: Callable[[float], None] = time.sleep) -> PoolClientConfig:
    """The configuration with the pool's nodes, and without etcd's password, which is not needed any more.

    Waits for at most ETCD_WAIT_S, plus one request. Raises StartupError if etcd does not answer or names no
    node of the pool.
    """
    if config.nodes or not config.etcd.endpoints:
        return replace(config, etcd=EtcdConfig())
    until_s = time.monotonic() + ETCD_WAIT_S
    waited = False
    while True:
        problem = f"it knows no node of the pool '{config.cluster}': start one, or set pool.cluster"
        try:
            nodes = discover(config.etcd, config.cluster)
            if nodes:
                refs = [PoolNodeRef(node=n.node, address=n.address) for n in nodes]
                return replace(config, nodes=refs, etcd=EtcdConfig())
        except PoolError as error:
            problem = str(error)
        if time.monotonic() >= until_s:
            raise StartupError(f"pool.etcd ({', '.join(config.etcd.endpoints)}): {problem}")
        if not waited:
            waited = True
            logger.info("waiting for the pool: %s", problem)
        sleep(POLL_S)
