"""A pool client on another host that says by which data path it reaches a node, and moves a page there.

Run as `python -m tests.support.netns.paths ADDRESS PAGE DATA_PATH [CA]`: prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.connector import connector_for
from pdserve.security.tls import TlsConfig
from tests.support.kvpool import made_pages as p

SEED = 5
WITHIN_S = 30.0
BYTES = 64 * 1024


def main(address: str, page: int, data_path: Any, *ca: str) -> None:
    config = PoolClientConfig(
        nodes=[PoolNodeRef(node="one", address=address)],
        data_path=data_path,
        tls=TlsConfig(ca=Path(ca[0])) if ca else TlsConfig(),
        get_timeout_s=WITHIN_S,
        put_timeout_s=WITHIN_S,
        connect_timeout_s=WITHIN_S,
    )
    connector = connector_for(config, "paths")
    until = time.monotonic() + WITHIN_S
    while True:
        try:
            connection = connector.connect(address, time.monotonic() + WITHIN_S)
            break
        except PoolError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    path = type(connection).__name__
    connection.close()
    client = PoolClient(config, "paths", {"paths": "1"}, name="paths")
    key = p.key_of(SEED, page)
    whole, found = p.content(key, BYTES), np.zeros(BYTES, np.uint8)
    stored = client.put([key], [[whole]]) == [True]
    is_right = client.get([key], [[found]]) == [True] and bool(np.array_equal(whole, found))
    print(json.dumps({"path": path, "stored": stored, "is_right": is_right}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *sys.argv[4:])
