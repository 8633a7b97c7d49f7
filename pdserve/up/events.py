"""What happens to the processes of a cluster, and what is done: lifecycle.py's events and actions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from pdserve.up.spec import Plan


@dataclass(frozen=True)
class BecameReady:
    """A process that was started is ready."""

    name: str


@dataclass(frozen=True)
class Ended:
    """A process has ended, and its session with it."""

    name: str
    status: int
    """Exit status; negative: minus the signal that killed it."""
    lines: Sequence[str] = ()
    """Its last lines of output."""
    problem: str = ""
    """Why it could not even be started."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class RestartAsked:
    """Every process is to be restarted, one after the other. `Restarted` follows."""


@dataclass(frozen=True)
class Upgraded:
    """A process goes on as the version that is installed now, and serves."""

    name: str
    problem: str = ""
    """Why it does not; empty: it does."""


@dataclass(frozen=True)
class StopAsked:
    """A signal to stop; a second one stops at once."""

    by: str
    """The signal's name."""


@dataclass(frozen=True)
class ScaleAsked:
    """Other numbers of workers are wanted. `Scaled` follows."""

    plan: Plan
    """As it is to be. What is in both plans is the same, but for the router's list of workers."""


Event: TypeAlias = BecameReady | Ended | Tick | RestartAsked | Upgraded | ScaleAsked | StopAsked


@dataclass(frozen=True)
class Start:
    """Start this process. `BecameReady` and `Ended` follow."""

    name: str
    again: bool
    """It was ready before: its log is continued."""


@dataclass(frozen=True)
class Terminate:
    """Ask this process to end."""

    name: str


@dataclass(frozen=True)
class Kill:
    """End this process and its whole session at once."""

    name: str


@dataclass(frozen=True)
class Reload:
    """SIGHUP: this process replaces itself or its own children, and refuses no client meanwhile."""

    name: str


@dataclass(frozen=True)
class Upgrade:
    """Have this process go on as the version that is installed now. `Upgraded` follows."""

    name: str


@dataclass(frozen=True)
class Rewire:
    """Write this process's configuration as it is in the newest plan; `Reload` follows if it runs."""

    name: str


@dataclass(frozen=True)
class Scaled:
    """What the last `ScaleAsked` wanted is so, or cannot be."""

    problem: str = ""
    """Empty: it is so."""


@dataclass(frozen=True)
class Restarted:
    """What `RestartAsked` wanted is so, or cannot be."""

    problem: str = ""
    """Empty: it is so."""


@dataclass(frozen=True)
class Say:
    """A line for the console."""

    text: str


@dataclass(frozen=True)
class Announce:
    """All processes are ready: tell the user how to reach the cluster."""


@dataclass(frozen=True)
class Exit:
    """No process is left: end the supervisor with this status."""

    status: int


Action: TypeAlias = (
    Start | Terminate | Kill | Reload | Upgrade | Rewire | Scaled | Restarted | Say | Announce | Exit
)


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster."""

    name: str
    role: str
    host: str
    """Empty: the supervisor's."""
    phase: str
    """As of lifecycle.py: starting, ready, backoff, ended, ..."""
    restarts: int
