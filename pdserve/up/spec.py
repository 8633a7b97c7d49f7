"""The processes of a cluster, as they are to run. Pure. plan.py makes them of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdserve.up.config import WORKER_ROLES, ClusterSettings, Restart, Role, Table
from pdserve.up.upgrade import Command

METRICS_HOST: Final = "127.0.0.1"
"""Where pool nodes and the admin port listen, unless their tables say otherwise."""
STOP_SLACK_S: Final[Mapping[Role, float]] = {**dict.fromkeys(WORKER_ROLES, 8.0), "router": 5.0}
"""What a process takes beyond its own `stop_grace_s`: last words, and the end of its children."""


@dataclass(frozen=True)
class HttpReady:
    """Ready when a GET is answered 200."""

    url: str
    certificate: tuple[str, str] | None = None
    """Files of a certificate and its key, for a server that asks for one."""


@dataclass(frozen=True)
class ConnectReady:
    """Ready when the control address (`unix:/path` or `tcp:host:port`) accepts a connection."""

    address: str


@dataclass(frozen=True)
class Listening:
    """A TCP port that a process is told to listen on; `chosen`: asked for, not automatic."""

    host: str
    port: int
    chosen: bool


@dataclass(frozen=True)
class ProcessSpec:
    """One process: what to run, with which configuration, and how to tell that it is ready."""

    name: str
    role: Role
    table: str
    """Where its table stands in the cluster file, as in `decode[0]`."""
    argv: tuple[str, ...]
    config: Table
    config_path: Path
    log_path: Path
    ready: HttpReady | ConnectReady
    restart: Restart
    listening: tuple[Listening, ...] = ()
    automatic_ports: tuple[int, ...] = ()
    """All free ports that it was given, in this order."""
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float | None = None
    """Longest time until it is ready; None: the cluster's."""
    release_s: float = 0.0
    """What it may take beyond its grace to give its memory back."""
    gpu_count: int = 0
    """GPUs that its ranks compute on where its host has any; 0: none."""
    needs_gpus: bool = False
    """It cannot do without."""
    gpu_numbers: tuple[int, ...] = ()
    """Which ones; empty: any."""
    gpus_of_others: tuple[int, ...] = ()
    """Numbers of those that others on its host name for themselves."""
    has_gpus: bool = False
    """It computes on GPUs that no other process has, as far as is known before it starts."""
    host: str = ""
    """Name of the host that runs it; empty: this one."""
    upgrade: Command | None = None
    """What lets it go on as the version that is installed now; None: it is started again instead."""


@dataclass(frozen=True)
class Plan:
    """A cluster to run."""

    settings: ClusterSettings
    stages: tuple[tuple[ProcessSpec, ...], ...]
    router_url: str

    @property
    def live_page(self) -> str:
        """URL of the router's live page; empty where it has none."""
        admin = (self.routers[0].config.get("admin") or {}) if self.routers else {}
        scheme = "https" if admin.get("tls", {}).get("certificate") else "http"
        return (
            f"{scheme}://{admin.get('host', METRICS_HOST)}:{admin['port']}/live/" if admin.get("port") else ""
        )

    @property
    def routers(self) -> Sequence[ProcessSpec]:
        """The first is that of `router_url`. None: commands serve clients themselves."""
        return [spec for spec in self.stages[-1] if spec.role == "router"]

    @property
    def run_dir(self) -> Path:
        """Where its logs and configurations are."""
        return self.stages[0][0].config_path.parent

    @property
    def processes(self) -> list[ProcessSpec]:
        """All processes in the order they start."""
        return [spec for stage in self.stages for spec in stage]


def grace_s(spec: ProcessSpec, settings: ClusterSettings) -> float:
    """How long a process may take to end: `stop_grace_s`, and more where its own table gives it more."""
    own_s: float = spec.config.get("stop_grace_s", 0.0)
    slack_s = STOP_SLACK_S.get(spec.role, 0.0) if own_s else 0.0
    return max(settings.stop_grace_s, own_s + slack_s) + spec.release_s
