"""A process that keeps many hostile connections open, of one attack at a time.

Run as `python -m benchmarks.hostile.attacker CONFIG.json`. A line on its standard input is
`PORT NAME OF THE ATTACK`, or `rest`. A line answers when all connections were tried once: how many were
taken. Connections that were closed are opened again. It runs only where nobody else wants to, as if it ran
elsewhere.
"""

from __future__ import annotations

import contextlib
import resource
import select
import sys
from typing import Final

import msgspec

from benchmarks.hostile.attacks import Attack, Held, Secrets, attack_named
from benchmarks.pool.load_process import run_when_idle
from benchmarks.processes import read_config

ROUND_S: Final = 0.2  # between looks for connections that were closed
REST: Final = "rest"


class AttackerConfig(msgspec.Struct, frozen=True):
    """`name`: of the process."""

    name: str
    connections: int
    secrets: Secrets


class Attacker:
    """The connections."""

    def __init__(self, config: AttackerConfig) -> None:
        self._config = config
        self._held: list[Held] = []
        self._turn = 0

    def hold(self, attack: Attack, port: int) -> int:
        """Have all connections open, and have them ask again. Returns how many were opened now."""
        opened = 0
        still = []
        for one in self._held:
            if one.is_open:
                one.ask_again()
                still.append(one)
            else:
                one.close()
        self._held = still
        for _ in range(self._config.connections - len(still)):
            self._turn += 1
            way = attack.ways[self._turn % len(attack.ways)]
            with contextlib.suppress(OSError):
                self._held.append(way(port, self._config.secrets))
                opened += 1
        return opened

    def rest(self) -> None:
        """Close all."""
        for one in self._held:
            one.close()
        self._held.clear()


def main(config_path: str) -> None:
    """See above."""
    run_when_idle()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(read_config(config_path, AttackerConfig))
    doing: tuple[Attack, int] | None = None
    while True:
        told, _, _ = select.select([sys.stdin], [], [], ROUND_S)
        if told:
            line = sys.stdin.readline().strip()
            if not line:
                return
            port, _, name = line.partition(" ")
            doing = None if line == REST else (attack_named(name), int(port))
            attacker.rest()  # the connections of another attack would go on
        opened = attacker.hold(*doing) if doing is not None else 0
        if told:
            print(opened, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
