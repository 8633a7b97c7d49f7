"""`pdserve router`."""

from __future__ import annotations

import logging
import os

from pdserve.router.config.router import RouterConfig
from pdserve.router.sessions.keys import parse_sources
from pdserve.router.sharing.fork import configure_logging
from pdserve.router.sharing.prefork import ChildFailed, run_router
from pdserve.router.tenants.api_keys import check_open, load_keys
from pdserve.settings.command_line import RESTARTED, ConfigSource, config_command

logger = logging.getLogger(__name__)


def run(config: RouterConfig, source: ConfigSource[RouterConfig] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; raises ConfigError, StartupError."""
    configure_logging(config)
    config.check_workers()
    parse_sources(config.session.sources)
    if check_open(config, load_keys(config.access)):
        logger.warning("insecure, no API keys: everyone who reaches %s uses the models", config.host)
    try:
        run_router(config, source, is_strict=RESTARTED not in os.environ)
    except ChildFailed as error:  # it has said why
        return error.status
    return 0


command = config_command(
    RouterConfig, run, help="Run the router: one OpenAI endpoint before the workers.", reloadable=True
)
