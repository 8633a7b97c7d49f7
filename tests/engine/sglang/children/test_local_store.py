"""Torch's store of a worker's ranks: who can reach it, and that no other program takes its port."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import ModuleType

import pytest

from pdserve.engine.sglang.children import local_store
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


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_claimed_port_is_taken_for_all_but_the_store(address: str) -> None:
    claim = local_store.claimed(port := free_ports(1)[0])
    assert claim is not None
    with claim:
        assert local_store.claimed(port) is None
        with pytest.raises(OSError, match="in use"):
            socket.create_server((address, port))
        listening = local_store._listen(port)
        assert listening is not None
        with socket.socket(fileno=listening) as store, socket.create_connection(("127.0.0.1", port)):
            store.settimeout(10)
            store.accept()[0].close()
            assert local_store._listen(port) is None
    assert local_store.claimed(free_ports(1)[0]) is not None


def test_ports_that_sglang_chooses_are_claimed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another program has is passed over; the data parallel controller's own hold is no obstacle.
    Modules stand for SGLang's, whose import takes 10 s; the self-check holds their names to the real ones.
    """
    server_args, controller = ModuleType("server_args"), ModuleType("controller")
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", server_args)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.data_parallel_controller", controller)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free, other = free_ports(2)
        offered = iter([taken.getsockname()[1], free, free, other, other])
        server_args.get_free_port_below_ephemeral = lambda: next(offered)  # type: ignore[attr-defined]
        controller.bind_port = lambda port: socket.create_server(("", port))  # type: ignore[attr-defined]
        local_store.claim_ports()
        local_store.claim_ports()
        assert [server_args.get_free_port_below_ephemeral() for _ in range(2)] == [free, other]
        for port in (free, other):
            controller.bind_port(port).close()
            assert local_store.claimed(port) is None
        with pytest.raises(StopIteration):
            server_args.get_free_port_below_ephemeral()
        with pytest.raises(OSError, match="in use"):
            controller.bind_port(taken.getsockname()[1])


def test_a_process_group_of_one_host_listens_on_loopback() -> None:
    """As SGLang makes it, by a rendezvous at a TCP address; torch alone listens on all interfaces."""
    claim = local_store.claimed(port := free_ports(1)[0])
    assert claim is not None
    with claim:
        done = subprocess.run(
            [sys.executable, "-c", RANKS, str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout == "['127.0.0.1'] b b\n", done.stderr
