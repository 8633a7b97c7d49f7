"""Taking over a changed configuration in a running router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdserve.errors import PdserveError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet, listed_workers

logger = logging.getLogger(__name__)

TAKEN_OVER = ("prefill", "decode", "agg", "elastic", "tenants", "tenant_defaults", "admission", "aliases")
"""The workers here, the rest by `Gate.configure`."""


def take_over(before: RouterConfig, load: Callable[[], RouterConfig], fleet: Fleet) -> RouterConfig:
    """The lists of workers as the configuration has them now; of what else changed, the log says that it
    needs a restart. A configuration that cannot be used changes nothing.
    """
    try:
        config = load()
        config.check_workers()
        joined, left = fleet.members.sync("config", listed_workers(config))
    except PdserveError as error:
        logger.error("the configuration is not changed: %s", error)  # noqa: TRY400 - one line
        return before
    names = (
        [f"{worker.role} {worker.id}" for worker in joined],
        [f"{worker.role} {worker.id}" for worker in left],
    )
    logger.info(
        "configuration read again: joined: %s; left: %s", *(", ".join(some) or "none" for some in names)
    )
    waiting = [name for name in changed_options(before, config) if name not in TAKEN_OVER]
    if waiting:
        logger.warning("changed, and taken over at the next start only: %s", ", ".join(waiting))
    return config


def changed_options(before: RouterConfig, after: RouterConfig) -> list[str]:
    """Names of the options (of the tables, for options within one) that differ."""
    names = (field.name for field in msgspec.structs.fields(RouterConfig))
    return [name for name in names if getattr(before, name) != getattr(after, name)]


Stamp = tuple[int, int, int]


async def watch_file(
    path: Path | None, every_s: float, on_change: Callable[[], None], seen: Stamp | None
) -> None:
    """Call `on_change` whenever the file is another than before, first than `seen`, until cancelled."""
    if path is None:
        return
    while True:
        await asyncio.sleep(every_s)
        now = stamp(path)
        if now not in (seen, None):
            seen = now
            on_change()


def stamp(path: Path | None) -> Stamp | None:
    """What tells one state of a file from another; None while it is being replaced, or for none."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
