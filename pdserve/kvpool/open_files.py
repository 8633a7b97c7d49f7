"""How many files a node may have open: a connection is one, over UCX some."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

OTHER_FILES = 64  # that a node has open beside its sockets


def raise_open_files(name: str, max_connections: int, sockets: int) -> None:
    """Let this process open as many files as it may; say so where that is too few for `sockets`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = sockets + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        logger.warning(
            "node %s: max_connections = %d needs %d open files, this process may have %d: raise the limit "
            "(ulimit -Hn, LimitNOFILE=, --ulimit nofile=), or lower max_connections",
            name,
            max_connections,
            needed,
            hard,
        )
