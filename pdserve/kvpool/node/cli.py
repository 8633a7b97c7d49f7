"""`pdserve pool serve`, by itself: a node that restarts is waited for, so it loads nothing of the other words
of `pdserve pool` (tables, clients).
"""

from __future__ import annotations

import sys

import msgspec

from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.logs import configure_logs
from pdserve.settings.command_line import config_command


def _serve(config: PoolNodeConfig) -> None:
    # its help needs neither event loop nor UCX
    from pdserve.kvpool.node.upgrade.handover import hold_signals

    hold_signals(hold=True)  # until the node handles them; threads that NumPy starts never take them
    from pdserve.kvpool.node.process import run_node

    configure_logs(config.log_format, config.log_level, node=config.name)
    run_node(config)


def _check(config: PoolNodeConfig) -> None:
    from pdserve.kvpool.node.process import check_node

    sys.stdout.write(msgspec.json.encode(check_node(config)).decode() + "\n")


command = config_command(
    PoolNodeConfig,
    _serve,
    check=_check,
    help="Run a pool node until SIGTERM. Pages stay in memory for the next start.",
)
