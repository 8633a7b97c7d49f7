"""Where a node's pages are, as it answers who asks."""

from __future__ import annotations

from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import answers, key
from tests.support.kvpool.tier_rig import SSD, Rig

BELOW = TierSpec("object:/secret", "object", 1 << 30)


def places(rig: Rig, *keys: int) -> tuple[list[int], list[str]]:
    [said] = answers(rig.node.send(rig.c, m.Exists(9, rig.ns, [key(k) for k in keys], places=True)), rig.c)
    assert isinstance(said, m.Present)
    assert [bool(place) for place in said.places] == [bool(byte) for byte in said.mask]
    return list(said.places), said.tiers


def test_places_are_told_to_those_who_ask_by_the_kind_of_the_tier() -> None:
    rig = Rig(SSD, BELOW)
    rig.put(*range(12))
    rig.drain()
    rig.put(*range(20, 32))  # of 16 in memory the first go
    assert places(rig, 0, 31, 99) == ([2, m.IN_MEMORY, m.NOWHERE], ["ssd", "object"])
    plain = rig.node.ask(rig.c, m.Exists(9, rig.ns, [key(0)]), m.Present)
    assert (plain.places, plain.tiers) == (b"", [])
