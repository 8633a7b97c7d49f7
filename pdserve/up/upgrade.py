"""The upgrade of a pool node: a command of its own program, which the supervisor runs beside itself. It
ends once the node goes on, with all its pages, as the version that is installed now.
"""

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

BACK_S: Final = 30.0
"""For the node to be back with all its pages, and for the others to have all that is theirs."""
MOST_S: Final = 120.0
"""Of the whole command: the node also has 65 s to load its new version beside the old one."""


@dataclass(frozen=True)
class Command:
    """It ends with status 0 once the process serves as the new version."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides the supervisor's. Secrets go here: others can read command lines."""


def pool_upgrade(program: Sequence[str], address: str, config: Mapping[str, Any]) -> Command:
    """Of the node with this configuration. `program`: pdserve's."""
    words = [*program, "pool", "upgrade", address, "--deadline", f"{BACK_S:.0f}"]
    if file := config.get("admin_token_file"):
        words += ["--token-file", str(file)]
    given = {"PDSERVE_POOL_TOKEN": config.get("admin_token")}
    tls = config.get("tls") or {}
    if tls.get("certificate"):  # the node's own files are good for its clients too
        given |= {f"PDSERVE_POOL_TLS_{key.upper()}": tls.get(key) for key in ("ca", "certificate", "key")}
    return Command(tuple(words), {name: str(value) for name, value in given.items() if value})


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
