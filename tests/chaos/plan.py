"""Which faults come when: a function of the seed, the length and the kinds of fault. Pure.

The run is a row of episodes. Each begins with one fault that disturbs a node, sometimes one on a second node
at the same time, and with lighter faults that disturb nobody else; then comes calm, in which everything must
be as if nothing had happened. Kinds are drawn from a bag that is refilled when it is empty, so that even a
short run sees each of them about equally often.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import msgspec

Kind: TypeAlias = Literal[
    "kill",  # kill -9 a node, start it again after `for_s`
    "reboot",  # kill -9 a node, its memory gone, bits of its SSD flipped, start it again after `for_s`
    "upgrade",  # every node in turn, as `pdserve pool upgrade` does
    "visit",  # a node joins, stays for `for_s`, drains and leaves
    "pause",  # SIGSTOP a node, SIGCONT after `for_s`
    "hang_up",  # every connection to a node is closed, new ones too, for `for_s`
    "silence",  # connections to a node stay and carry nothing, for `for_s`
    "flip",  # one bit of a page in a node's memory
    "pause_client",  # SIGSTOP a client, SIGCONT when its leases are over
    "kill_client",  # kill -9 a client in whatever it does; another takes its place
    "abandon",  # a client reserves pages, then is killed
    "pressure",  # a second namespace is written until memory is full, for `for_s`, and emptied
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DISTURBING: Final[frozenset[Kind]] = frozenset(
    ("kill", "reboot", "upgrade", "visit", "pause", "hang_up", "silence", "pressure")
)
"""Kinds that open an episode; at most one of these for each node at a time."""
ALONE: Final[Kind] = "upgrade"
"""It must cost no client anything: no other node is disturbed meanwhile, or it would not show."""

FIRST_AT_S: Final = 2.0
FOR_S: Final = (0.5, 2.5)
CALM_S: Final = (3.5, 5.0)  # after the end of a fault
LAST_CALM_S: Final = 4.0
SECOND_NODE: Final = 0.2  # probability


class Fault(msgspec.Struct, frozen=True):
    """One fault. `node` counts the nodes of the start; `draw` seeds what else the fault chooses."""

    at_s: float
    kind: Kind
    node: int
    for_s: float
    draw: int


class Plan(msgspec.Struct, frozen=True):
    """All there is to a run. Workers draw from the same seed."""

    seed: int
    minutes: float
    nodes: int
    faults: list[Fault]


def make_plan(seed: int, minutes: float, nodes: int = 3, kinds: Sequence[Kind] = KINDS) -> Plan:
    """Raises ValueError: no kinds."""
    if not kinds:
        raise ValueError("a plan needs kinds of faults")
    draw = random.Random(f"plan {seed}")
    heavy = _Bag(draw, [kind for kind in kinds if kind in DISTURBING])
    light = _Bag(draw, [kind for kind in kinds if kind not in DISTURBING])
    faults: list[Fault] = []
    at_s = FIRST_AT_S
    while True:
        for_s = round(draw.uniform(*FOR_S), 3)
        end_s = at_s + for_s
        if end_s + LAST_CALM_S > minutes * 60 and faults:
            return Plan(seed, minutes, nodes, faults)
        first, second, third = (draw.sample(range(nodes), nodes) * 3)[:3]
        if heavy.kinds:
            kind = heavy.take()
            faults.append(Fault(round(at_s, 3), kind, first, for_s, draw.getrandbits(32)))
            if nodes > 1 and draw.random() < SECOND_NODE and ALONE not in (kind, heavy.next):
                faults.append(Fault(round(at_s, 3), heavy.take(), second, for_s, draw.getrandbits(32)))
        if light.kinds:
            light_at_s = round(at_s + draw.uniform(0.0, for_s + CALM_S[0]), 3)
            faults.append(Fault(light_at_s, light.take(), third, 0.0, draw.getrandbits(32)))
        at_s = end_s + draw.uniform(*CALM_S)


class _Bag:
    """Each kind once, in any order, then again."""

    def __init__(self, draw: random.Random, kinds: list[Kind]) -> None:
        self.kinds = kinds
        self._draw = draw
        self._left: list[Kind] = []

    @property
    def next(self) -> Kind:
        """What `take` will give."""
        if not self._left:
            self._left = self._draw.sample(self.kinds, len(self.kinds))
        return self._left[-1]

    def take(self) -> Kind:
        kind = self.next
        self._left.pop()
        return kind
