"""Real nodes among each other."""

from __future__ import annotations

import time
from pathlib import Path

from pdserve.kvpool import messages as m
from pdserve.kvpool.cluster_messages import ACTIVE, GetView, View
from pdserve.kvpool.transports.control import ControlChannel, make_hello

from ..contracts.pools import ProcessPool, remove_arena
from .test_node import small_config


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_a_node_alone_tells_its_view_in_welcome_on_request_and_in_its_status(tmp_path: Path) -> None:
    pool = ProcessPool(small_config(), tmp_path, "shm")
    try:
        channel = ControlChannel.connect(pool.address, make_hello("test", "", "none"), soon())
        welcome = channel.welcome
        assert [(n.node, n.address) for n in welcome.nodes] == [("node", pool.address)]
        view = channel.call(GetView(1), soon())
        assert view == View(1, welcome.epoch, welcome.nodes, [])
        report = channel.call(m.Status(2), soon())
        assert isinstance(report, m.StatusReport)
        assert report.epoch == welcome.epoch > 0
        assert [(n.node, n.status, n.settled) for n in report.members] == [("node", ACTIVE, report.epoch)]
        channel.close()
        pool.close()
    finally:
        pool.kill()
        remove_arena(pool.config)
