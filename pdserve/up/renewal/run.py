"""Runs such a command, and says what went wrong."""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

from pdserve.up.renewal.command import MOST_S, Command


async def problem_of(command: Command) -> str:
    """Run it; gives the last line of what it says where it fails, else nothing. It never outlives this."""
    environment = {**os.environ, **command.environment}
    try:
        process = await asyncio.create_subprocess_exec(
            *command.words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=environment
        )
    except OSError as error:
        return f"{command.words[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(MOST_S):
            _, said = await process.communicate()
    except TimeoutError:
        return f"its upgrade was not done within {MOST_S:.0f} s"
    finally:
        await _end(process)
    if process.returncode == 0:
        return ""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its upgrade ended with status {process.returncode}"


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
