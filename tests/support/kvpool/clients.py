"""What tests of both clients share: nodes behind doors, and clients' configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.door import Door
from tests.support.kvpool.inproc import InprocNode

KIB = 1024


def doors_of(directory: Path, count: int = 1, **limits: Any) -> list[Door]:
    """Nodes n0, n1, ... of this process, each behind a door."""
    layout = TableLayout(1024 * KIB, 64 * KIB, 4 * KIB)
    nodes = [InprocNode(f"n{i}", layout, Limits(**limits)) for i in range(count)]
    return [Door(node, directory / f"{node.name}.sock") for node in nodes]


def config_of(doors: Sequence[Door], **options: Any) -> PoolClientConfig:
    refs = [PoolNodeRef(node=door.node.name, address=door.address) for door in doors]
    return PoolClientConfig(nodes=refs, **{"retry_after_s": 0.02, **options})
