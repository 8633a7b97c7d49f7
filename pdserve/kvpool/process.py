"""A pool node as a process: its signals, its open files, and the program before it, if there was one."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import msgspec
import uvloop
from msgspec.structs import replace

from pdserve.errors import StartupError
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.handover import ENDING, Handover, Succession, hold_signals, received, replace_process
from pdserve.kvpool.node import MAX_UNGREETED, PoolNode
from pdserve.kvpool.open_files import raise_open_files
from pdserve.kvpool.transports.control import parse_address
from pdserve.kvpool.upgrade import check_start


def run_node(config: PoolNodeConfig) -> None:
    """Run a node in this process until SIGTERM or SIGINT. Raises StartupError, ConfigError."""
    for address in config.listen:
        parse_address(address)
    raise_open_files(config.name, config.max_connections, config.max_connections + MAX_UNGREETED)
    succession = received()
    if succession is not None:
        found = check_start(config) if succession.stands_in else None
        _load(succession, config)
        if not succession.await_turn(msgspec.json.encode(found).decode()):
            return
    handover = uvloop.run(_run(config, succession))
    if handover is not None:
        replace_process(handover)


def _load(succession: Succession, config: PoolNodeConfig) -> None:
    """What the node will need at once, and is loaded late otherwise."""
    if config.metrics:
        import pdserve.kvpool.metrics_server  # noqa: F401
    if succession.handover.ucx:
        from pdserve.kvpool.transports.ucx import UcxLibrary

        with contextlib.suppress(StartupError):  # the node will say so
            UcxLibrary()


async def _run(config: PoolNodeConfig, succession: Succession | None) -> Handover | None:
    node = PoolNode(config, succession)
    loop = asyncio.get_running_loop()
    told_to_end = asyncio.Event()

    def end() -> None:
        told_to_end.set()
        node.stop()

    for number in ENDING:
        loop.add_signal_handler(number, end)
    if succession is not None and succession.handover.told_to_end:
        end()  # once it serves
    hold_signals(hold=False)
    # what was made until then stays: the collector would take 20 ms to look at the index of a million pages
    await node.serve(gc.freeze)
    if node.handover is None:
        return None
    return replace(node.handover, told_to_end=told_to_end.is_set())
