"""What is made of the answers of several nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.node.peers.questions import joined
from pdserve.kvpool.protocol import messages as m

PLACES = st.integers(m.NOWHERE, m.IN_MEMORY + 2)


@given(st.data(), st.integers(1, 6))
def test_a_page_is_where_any_node_has_it_in_memory_before_a_tier(data: st.DataObject, count: int) -> None:
    tiers = [["ssd", "object"], data.draw(st.permutations(["ssd", "object"]))]
    lists = st.lists(PLACES, min_size=count, max_size=count)
    here, there = data.draw(lists), data.draw(lists)
    asked = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    told = [there[i] for i in asked]
    own = m.Present(1, bytes(p > 0 for p in here), places=bytes(here), tiers=tiers[0])
    other = m.Present(2, bytes(p > 0 for p in told), places=bytes(told), tiers=tiers[1])
    both = joined(own, asked, other)

    def kind(place: int, kinds: list[str]) -> str | None:
        named = [None, "dram", *kinds]
        return named[place]

    for i in range(count):
        found = [kind(here[i], tiers[0]), *([kind(there[i], tiers[1])] if i in asked else [])]
        wanted = "dram" if "dram" in found else next((one for one in found if one is not None), None)
        assert kind(both.places[i], both.tiers) == wanted
        assert both.mask[i] == (wanted is not None)


def test_a_fate_is_the_word_of_the_page_s_owner_and_an_answer_without_places_has_none() -> None:
    own = m.Present(1, b"\0\1", fates=[m.Fate(), m.Fate(1.0)])
    both = joined(own, [0], m.Present(2, b"\1", fates=[m.Fate(3.0)], places=b"\1"))
    assert (both.mask, both.fates, both.places) == (b"\1\1", [m.Fate(3.0), m.Fate(1.0)], b"")
