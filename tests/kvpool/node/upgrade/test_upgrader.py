"""An upgrade that ends by a bug, or whose new version does not start: seen, and in nobody's way."""

from __future__ import annotations

import asyncio
import io
from typing import Any, cast

import pytest

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.node.config.node import PoolNodeConfig
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


class Child:
    """A process that ends at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return 3 if self.looks == 3 else None

    def wait(self, timeout_s: float | None = None) -> int:
        raise AssertionError("it would hold up the loop")


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

    async def load() -> None:
        if sent_away:
            upgrader.goodbye_fault = m.Fault(0, "upgrading", "")
        raise RuntimeError("bug")

    monkeypatch.setattr(upgrader, "_load", load)
    asyncio.run(ended(upgrader, None))
    assert "unexpected error" in caplog.text
    assert [type(failure) for failure in host.failures] == [NodeFailed] * sent_away
    assert not upgrader._under_way


def test_clients_are_served_while_a_new_version_that_would_not_start_ends() -> None:
    upgrader = Upgrader(cast(Any, Host()))
    upgrader._child = cast(Any, Child())
    why = asyncio.run(upgrader._why_not_loaded(io.BytesIO(b"trace\nno such option\n")))
    assert why == "the new version would not start: no such option"
