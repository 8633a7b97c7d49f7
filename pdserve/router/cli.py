"""`pdserve router`."""

from __future__ import annotations

import logging
import os

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.health_check import FirstRound
from pdserve.router.processes.parent import run_processes
from pdserve.router.processes.serving import configure_logging, serve_alone
from pdserve.router.tenants.api_keys import check_open, load_keys
from pdserve.settings.command_line import RESTARTED, ConfigSource, config_command

logger = logging.getLogger(__name__)


def run(config: RouterConfig, source: ConfigSource[RouterConfig] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; raises ConfigError, StartupError."""
    configure_logging(config)
    config.check_workers()
    if check_open(config, load_keys(config.access)):
        logger.warning("insecure, no API keys: everyone who reaches %s uses the models", config.host)
    first = FirstRound(strict=RESTARTED not in os.environ)
    if config.processes > 1:
        run_processes(config, source, first)
    else:
        serve_alone(config, source, first)
    return 0


command = config_command(
    RouterConfig, run, help="Run the router: one OpenAI endpoint before the workers.", reloadable=True
)
