"""The messages between a router's parent process and its children."""

from __future__ import annotations

import msgspec

from pdserve.router.fleet.changes import FleetChange
from pdserve.router.metrics.snapshot import Snapshot


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The child serves."""


class Collect(msgspec.Struct, tag="collect", frozen=True):
    """Asks a child for its metrics, or the parent for those of all children."""

    number: int


class Collected(msgspec.Struct, tag="collected", frozen=True):
    """The answer to `Collect`."""

    number: int
    metrics: Snapshot


class Last(msgspec.Struct, tag="last", frozen=True):
    """The child's metrics as it ends."""

    metrics: Snapshot


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Read the API keys again: the admin API of one child was asked to."""


class Stopping(msgspec.Struct, tag="stopping", frozen=True):
    """The router is about to stop: `/ready` is to say so, while requests are still served."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Ids of all workers that the child refuses. A child that starts refuses the same."""

    workers: frozenset[str]


class LimitsTold(msgspec.Struct, tag="limits", frozen=True):
    """What a process tells all others of tenants' limits (`agreement`). The parent passes it on to all, its
    sender too, in one order.
    """

    data: bytes


FromChild = Ready | Collect | Last | FleetChange | Refused | Reload | LimitsTold
FromParent = Collect | FleetChange | Reload | LimitsTold | Stopping
