"""The messages between a router's parent process and its children."""

from __future__ import annotations

import msgspec

from pdserve.router.fleet.changes import FleetChange
from pdserve.router.metrics.snapshot import Snapshot
from pdserve.router.processes.shared_limits import Share, Want


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Child to parent: it serves."""


class Collect(msgspec.Struct, tag="collect", frozen=True):
    """To a child: its metrics, please. To the parent: everybody's."""

    number: int


class Collected(msgspec.Struct, tag="collected", frozen=True):
    """The answer."""

    number: int
    metrics: Snapshot


class Last(msgspec.Struct, tag="last", frozen=True):
    """Child to parent: its metrics, as it ends."""

    metrics: Snapshot


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """The API keys are to be read anew: one process was told so."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Child to parent: ids of the workers that it refuses; a process that starts is to refuse the same."""

    workers: frozenset[str]


class Wants(msgspec.Struct, tag="wants", frozen=True):
    """Child to parent: what changed of its tenants."""

    tenants: dict[str, Want]


class Shared(msgspec.Struct, tag="shared", frozen=True):
    """To a child: what changed of its tenants' shares."""

    tenants: dict[str, Share]


Message = Ready | Collect | Collected | Last | FleetChange | Refused | Reload | Wants | Shared
