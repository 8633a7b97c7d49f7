"""Torch's store of a worker's ranks: who can reach it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import free_ports

RANKS = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch.distributed as d
from pdserve.engine.sglang.children import local_store
local_store.install(); local_store.install()
from torch.distributed.rendezvous import rendezvous
store, rank, world = next(rendezvous(f"tcp://0.0.0.0:{sys.argv[1]}", rank=0, world_size=1))
again, *_ = next(rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1))
store.set("a", "b")
d.init_process_group("gloo", store=d.PrefixStore("p", again), rank=0, world_size=1)
import psutil
found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
print(sorted({one.ip for one in found}), store.get("a").decode(), again.get("a").decode())
"""


def test_a_process_group_of_one_host_listens_on_loopback() -> None:
    """As SGLang makes it, by a rendezvous at a TCP address; torch alone listens on all interfaces."""
    [port] = free_ports(1)
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "['127.0.0.1'] b b\n", done.stderr
