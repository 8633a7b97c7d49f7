"""Everything that the documents read from pdserve. No other module of this package imports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import typer

from pdserve.cli import SUB_COMMANDS, TWO_WORDS, load
from pdserve.engine.metric_names import METRICS as WORKER_METRICS
from pdserve.engine.worker import WorkerConfig
from pdserve.integrations.dynamo.config import DynamoConfig
from pdserve.kvpool.hicache.client_metrics import CLIENT_METRICS
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.metrics.families import METRICS as POOL_METRICS
from pdserve.kvpool.protocol.messages import PROTOCOL_VERSION, Reply, Request
from pdserve.kvpool.protocol.slot_table import ROW_DTYPE, TABLE_VERSION
from pdserve.kvpool.tiers.ssd.segment_format import ENTRY_DTYPE as SEGMENT_ENTRY_DTYPE
from pdserve.kvpool.tiers.ssd.segment_format import FORMAT_VERSION as SEGMENT_VERSION
from pdserve.metric import Definition
from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.stats import METRICS as ROUTER_METRICS
from pdserve.settings.config_file import Option, options
from pdserve.up.config import ClusterSettings, CommandConfig

__all__ = [
    "CONFIGURED",
    "LISTED",
    "METRICS",
    "PROTOCOL_VERSION",
    "REPLIES",
    "REQUESTS",
    "ROOT",
    "ROW_DTYPE",
    "SEGMENT_ENTRY_DTYPE",
    "SEGMENT_VERSION",
    "TABLE_VERSION",
    "Configured",
    "Definition",
    "Option",
    "commands",
    "options_of",
]

ROOT: Final = Path(__file__).parents[2]


class Configured(NamedTuple):
    """One configuration struct: the title and anchor of its section, and the commands that read it.
    `has_flags`: each of its options is also a flag of these commands.
    """

    title: str
    anchor: str
    struct: type[Any]
    commands: Sequence[str]
    has_flags: bool = True


CONFIGURED: Final = (
    Configured("Cluster: `[cluster]`", "cluster", ClusterSettings, ("pdserve up",), False),
    Configured("Router: `[router]`", "router", RouterConfig, ("pdserve router",)),
    Configured(
        "Workers: `[worker]`, `[[prefill]]`, `[[decode]]`, `[[agg]]`, `[[elastic]]`",
        "workers",
        WorkerConfig,
        ("pdserve prefill", "pdserve decode", "pdserve agg", "pdserve elastic"),
    ),
    Configured("Pool node: `[[pool]]`", "pool-node", PoolNodeConfig, ("pdserve pool serve",)),
    Configured(
        "Workers of NVIDIA Dynamo",
        "dynamo",
        DynamoConfig,
        ("pdserve dynamo agg", "pdserve dynamo prefill", "pdserve dynamo decode"),
    ),
    Configured("Another program: `[[command]]`", "command", CommandConfig, ("pdserve up",), False),
)

METRICS: Final[dict[str, tuple[Definition, ...]]] = {
    "Router": tuple(ROUTER_METRICS),
    "Workers": (*WORKER_METRICS, *CLIENT_METRICS),
    "Pool nodes": tuple(POOL_METRICS),
}
LISTED: Final = [one for definitions in METRICS.values() for one in definitions]
"""All metrics of pdserve. Tests compare them with what the processes show."""

REQUESTS: Final[tuple[Any, ...]] = get_args(Request)
REPLIES: Final[tuple[Any, ...]] = get_args(Reply)


def options_of(struct: type[Any]) -> list[Option]:
    """The options of a configuration struct, in the order of their declaration."""
    return list(options(struct))


def commands() -> Iterator[tuple[str, Any]]:
    """Each sub-command's words and its click command; a command of commands has `.commands`."""
    for name, sub in SUB_COMMANDS.items():
        yield f"pdserve {name}", typer.main.get_command(load(sub.target))
        for words, target in TWO_WORDS.items():
            if words[0] == name == "up":
                yield f"pdserve {' '.join(words)}", typer.main.get_command(load(target))
