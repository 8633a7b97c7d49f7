"""`pdserve router`."""

from __future__ import annotations

from pdserve.router.config.router import RouterConfig
from pdserve.router.processes.serving import run
from pdserve.settings.command_line import config_command

command = config_command(
    RouterConfig, run, help="Run the router: one OpenAI endpoint before the workers.", reloadable=True
)
