"""A client that reserves pages on a node, never writes them, and waits to be killed.

Run as `python -m pdserve.bench.chaos.abandon ADDRESS DATA_PATH COUNT`. Prints "ready" once it holds some.
"""

from __future__ import annotations

import os
import sys
import time
from typing import cast

from pdserve.bench.chaos.pages import SHAPES
from pdserve.bench.chaos.worker import GEOMETRY
from pdserve.errors import PoolRefused
from pdserve.kvpool.client_config import PoolClientConfig
from pdserve.kvpool.connectors import connector_for
from pdserve.kvpool.messages import GRANTED, DataPathChoice, Opened, OpenNamespace, Reserve, Reserved
from pdserve.kvpool.wire import KEY_BYTES

NAMESPACE = "abandoned"
CALL_TIMEOUT_S = 5.0


def main(address: str, data_path: str, count: int) -> None:
    """Raises PoolError."""
    deadline = time.monotonic() + CALL_TIMEOUT_S
    config = PoolClientConfig(data_path=cast(DataPathChoice, data_path))
    connection = connector_for(config, "abandon").connect(address, deadline)
    opened = connection.call(OpenNamespace(1, NAMESPACE, GEOMETRY), deadline)
    if not isinstance(opened, Opened):
        raise PoolRefused(f"{address}: {opened}")
    keys = [os.urandom(KEY_BYTES) for _ in range(count)]
    reserved = connection.call(Reserve(2, opened.namespace, keys, list(SHAPES[1])), deadline)
    # of random keys the node owns a share: one that it grants is enough
    if not isinstance(reserved, Reserved) or all(grant.status != GRANTED for grant in reserved.grants):
        raise PoolRefused(f"{address}: {reserved}")
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
