"""Real pool nodes, upgraded by a rolling restart under a client that reads. New versions load slowly."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from tests.support.kvpool.node_model import key
from tests.support.up.cluster import REAL_NODES, Cluster, running

PAGES = 32
PAGE_BYTES = 64 << 10
SOON_S = 60.0
"""Of a client: generous, because this is not about speed."""
SLOW_S = 0.5
FAULT = f"""
import os, time
if "PDSERVE_POOL_HANDOVER" in os.environ: # the node does not answer until this program has been loaded
    time.sleep({SLOW_S})
"""
FILE = """
[cluster]
name = "renewed"
[router]
[[pool]]
count = 2
capacity_bytes = "32MiB"
keep = false
env.PYTHONPATH = "DIRECTORIES"
[[agg]]
"""


class Reader:
    """Reads all pages again and again, each time from all nodes."""

    def __init__(self, cluster: Cluster) -> None:
        nodes = [
            PoolNodeRef(node=name, address=f"unix:{cluster.run_dir}/{name}.sock")
            for name in ("pool0", "pool1")
        ]
        bounds = {f"{what}_timeout_s": SOON_S for what in ("connect", "exists", "get", "put")}
        config = PoolClientConfig(nodes=nodes, restart_wait_s=SOON_S, **bounds)
        self._client = PoolClient(config, "ns", {"page_size": "64"})
        self._keys = [key(number) for number in range(PAGES)]
        page = np.ones(PAGE_BYTES, np.uint8)
        assert all(self._client.put(self._keys, [[page]] * PAGES))
        self.reads = 0
        self.missed = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()
            self._client.close()

    def _read(self) -> None:
        pages = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in self._keys]
        while not self._over.is_set():
            self.missed += self._client.get(self._keys, pages).count(False)
            self.reads += 1


def test_one_node_after_the_other_is_upgraded_and_no_page_is_missed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with running(tmp_path, FILE.replace("DIRECTORIES", path), program=REAL_NODES) as cluster:
        cluster.wait_for(r"renewed is ready at")
        reader = Reader(cluster)
        with reader.reading():
            cluster.ask_to_restart()
            cluster.wait_for(r"all processes have been restarted")
        steps = [
            (match[1], match[2])
            for line in cluster.lines
            if (match := re.search(r"node (pool\d): (upgrading$|it was upgraded)", line))
        ]
        names = ("pool0", "pool1")
        assert steps == [(name, step) for name in names for step in ("upgrading", "it was upgraded")]
        assert reader.missed == 0
        assert reader.reads > 0
