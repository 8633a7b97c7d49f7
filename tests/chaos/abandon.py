"""A client that reserves pages on a node, never writes them, and waits to be killed.

Run as `python -m tests.chaos.abandon ADDRESS DATA_PATH COUNT`. It prints "ready" once it
holds pages, or "left out: " and the reason when its node is down or grants none. Any other end is an error,
on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Final, cast

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import GRANTED, DataPathChoice, Opened, OpenNamespace, Reserve, Reserved
from pdserve.security.tokens import Secret
from tests.chaos.field import ADMIN_TOKEN
from tests.chaos.worker import GEOMETRY
from tests.support.kvpool.made_pages import SHAPES

READY: Final = "ready"
LEFT_OUT: Final = "left out: "
NAMESPACE: Final = "abandoned"
CALL_TIMEOUT_S: Final = 5.0


def main(address: str, data_path: str, count: int) -> None:
    """Raises PoolRefused, FrameError, ConfigError."""
    # of the operator, who may make a namespace
    config = PoolClientConfig(data_path=cast(DataPathChoice, data_path), token=Secret(ADMIN_TOKEN))
    connector = connector_for(config, "abandon")
    deadline = time.monotonic() + CALL_TIMEOUT_S
    keys = [os.urandom(KEY_BYTES) for _ in range(count)]
    try:
        connection = connector.connect(address, deadline)
        opening = OpenNamespace(1, NAMESPACE, GEOMETRY)
        namespace = expected(connection.call(opening, deadline), Opened, address).namespace
        reserve = Reserve(2, namespace, keys, list(SHAPES[1]))
        grants = expected(connection.call(reserve, deadline), Reserved, address).grants
    except (PoolUnavailable, PoolTimeout) as error:
        print(f"{LEFT_OUT}{error}", flush=True)
        return
    # of random keys the node owns a share: one that it grants is enough
    if all(grant.status != GRANTED for grant in grants):
        print(f"{LEFT_OUT}pool node {address} grants none of {count} pages", flush=True)
        return
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
