"""A client and a node on two hosts: pages go by UCX or TCP, and the network fails in every way it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.kvpool.made_pages import segments_of
from tests.support.netns.field import assert_nothing_is_held, until
from tests.support.netns.guest import TIMEOUT_S, TRAFFIC_PAGES

if TYPE_CHECKING:
    from tests.support.netns.field import Field

pytestmark = pytest.mark.long

LATE_S = TIMEOUT_S + 1.0  # R12


def test_pages_cross_the_network_and_arrive_whole(field: Field) -> None:
    size = sum(map(sum, map(segments_of, field.pages)))
    before = field.network.received_bytes("far")
    assert all(field.client.do("put", pages=field.pages)["ok"])
    assert field.network.received_bytes("far") - before > size  # they crossed the cable
    before = field.network.received_bytes("near")
    got = field.client.do("get", pages=field.pages)
    assert all(got["ok"])
    assert got["wrong"] == 0
    assert field.network.received_bytes("near") - before > size
    assert_nothing_is_held(field.node)


def test_a_damaged_page_is_found_on_the_other_host(field: Field) -> None:
    assert all(field.client.do("put", pages=field.pages)["ok"])
    field.node.flip_bits()
    before = field.client.do("get", pages=[])["corrupt"]
    got = field.client.do("get", pages=field.pages)
    assert not any(got["ok"])
    assert got["corrupt"] - before == len(field.pages)
    assert not any(field.client.do("exists", pages=field.pages)["ok"])


def begin_traffic(field: Field) -> None:
    """Pages move when this ends, until an operation fails. A first batch was written, and read."""
    before = field.node.status().counters["commits"]
    field.client.ask("traffic")
    until(lambda: field.node.status().counters["commits"] > before + TRAFFIC_PAGES, field.node.log)


def break_it(field: Field, fault: str) -> None:
    if fault == "unplugged":
        field.network.unplug("near")
    else:
        field.network.drop_to(fault)


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["unplugged", "near", "far"])
def test_a_network_that_fails_costs_misses_and_comes_back(field: Field, fault: str) -> None:
    """`fault`: the cable is out, or every packet to one of the two is lost and the others arrive."""
    assert all(field.client.do("put", pages=field.pages)["ok"])
    begin_traffic(field)
    break_it(field, fault)
    traffic = field.client.answer()
    assert traffic["good"] > 0
    assert traffic["failed"] > 0
    assert traffic["wrong"] == 0
    assert traffic["longest_s"] <= LATE_S
    missed = field.client.do("get", pages=field.pages)
    assert not any(missed["ok"])
    assert missed["took_s"] <= LATE_S
    assert_nothing_is_held(field.node)
    field.network.heal()

    def found_again() -> bool:
        got = field.client.do("get", pages=field.pages)
        assert got["wrong"] == 0
        assert got["took_s"] <= LATE_S
        return all(got["ok"])

    until(found_again, field.node.log)
    assert field.client.do("traffic", rounds=10)["failed"] == 0
    assert_nothing_is_held(field.node)


@pytest.mark.extended
@pytest.mark.parametrize("busy", [True, False])
def test_a_client_host_that_vanishes_leaves_nothing_behind(field: Field, busy: bool) -> None:
    if busy:
        begin_traffic(field)
    assert field.node.status().connections > 1
    field.network.unplug("near")
    field.client.kill()
    assert_nothing_is_held(field.node)
    if not busy:  # an idle connection's end is told by nothing but silence
        until(lambda: field.node.status().connections == 1, field.node.log)  # our own
