"""`pdserve router`."""

from __future__ import annotations

from pdserve.command import config_command
from pdserve.router.config import RouterConfig
from pdserve.router.serve import run

command = config_command(
    RouterConfig, run, help="Run the router: one OpenAI endpoint before the workers.", reloadable=True
)
