"""A real etcd, and members of it that notice within a second or two what happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.discovery import etcd as discovery
from tests.support.etcd_server import EtcdServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEASE_S", 1), ("TIMEOUT_S", 5.0), ("RETRY_S", 0.1)):
        monkeypatch.setattr(discovery, name, value)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    yield server
    server.kill()
