"""A store that misbehaves when told to, and nodes of one pool above any store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kvpool.object_server import ObjectServer, object_server
from tests.support.kvpool.object_tiers import BUCKET, CREDENTIALS, MakeNode, Node


@pytest.fixture
def store() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """Makes nodes of one pool, by name; their tiers are closed at the end."""
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    made: list[Node] = []

    def make(name: str, endpoint: str, url: str = "", **options: str | float) -> Node:
        options |= {"endpoint": endpoint} if endpoint else {}
        made.append(Node(tmp_path / name, url or f"s3://{BUCKET}/{tmp_path.name}", **options))
        return made[-1]

    yield make
    for node in made:
        if hasattr(node, "tier"):
            node.tier.close()
