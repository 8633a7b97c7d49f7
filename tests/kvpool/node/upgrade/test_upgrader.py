"""An upgrade that ends by a bug is seen, and in nobody's way."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.upgrade.upgrader import Upgrader
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Upgrade


class Host:
    """A node that keeps why it failed."""

    def __init__(self) -> None:
        self.config = PoolNodeConfig(name="n")
        self.failures: list[PdserveError] = []

    def fail(self, error: PdserveError) -> None:
        self.failures.append(error)


async def ended(upgrader: Upgrader, client: Any) -> None:
    upgrader.begin(client, Upgrade(1))
    assert upgrader._task is not None
    await asyncio.wait([upgrader._task])
    await asyncio.sleep(0)  # for what is called then


@pytest.mark.parametrize("sent_away", [False, True])
def test_an_upgrade_that_ends_by_a_bug_is_logged_and_ends_the_node_only_where_clients_were_sent_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent_away: bool
) -> None:
    host = Host()
    upgrader = Upgrader(cast(Any, host))

    async def check() -> None:
        if sent_away:
            upgrader.goodbye_fault = m.Fault(0, "upgrading", "")
        raise RuntimeError("bug")

    monkeypatch.setattr(upgrader, "_check", check)
    asyncio.run(ended(upgrader, None))
    assert "unexpected error" in caplog.text
    assert [type(failure) for failure in host.failures] == [NodeFailed] * sent_away
    assert not upgrader._under_way
