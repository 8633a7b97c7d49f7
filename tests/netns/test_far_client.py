"""A client and a node on two hosts: pages go by UCX, and the network fails under them in every way it can."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pdserve.bench.chaos import pages as p
from tests.support.netns.field import assert_nothing_is_held, until
from tests.support.netns.guest import TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.netns.field import Field

pytestmark = pytest.mark.long

LATE_S = TIMEOUT_S + 1.0  # R12
BACK_WITHIN_S = 15.0
VANISHED_WITHIN_S = 30.0
PAGES = [p.number(p.OWNED, 0, which * p.LARGE_EVERY) for which in range(16)]
PAGE_BYTES = sum(p.segments_of(PAGES[0]))


def test_pages_go_by_ucx_and_arrive_whole(field: Field) -> None:
    before = field.network.received_bytes("far")
    assert all(field.client.do("put", pages=PAGES)["ok"])
    assert field.network.received_bytes("far") - before > len(PAGES) * PAGE_BYTES  # they crossed the cable
    before = field.network.received_bytes("near")
    got = field.client.do("get", pages=PAGES)
    assert all(got["ok"])
    assert got["wrong"] == 0
    assert field.network.received_bytes("near") - before > len(PAGES) * PAGE_BYTES
    assert_nothing_is_held(field.node)


def test_a_damaged_page_is_found_on_the_other_host(field: Field) -> None:
    assert all(field.client.do("put", pages=PAGES)["ok"])
    field.node.flip_bits()
    got = field.client.do("get", pages=PAGES)
    assert not any(got["ok"])
    assert got["corrupt"] == len(PAGES)
    assert not any(field.client.do("exists", pages=PAGES)["ok"])


def fail_under_traffic(field: Field, fault: str) -> None:
    """Cut the network while pages move: what is asked then is missed in time, and nothing is held on to."""
    assert all(field.client.do("put", pages=PAGES)["ok"])
    field.client.ask("traffic", for_s=6.0)
    time.sleep(1.0)  # traffic before the fault; what the test is about happens during the fault
    break_it(field, fault)
    traffic = field.client.answer()
    assert traffic["good"] > 0
    assert traffic["failed"] > 0
    assert traffic["wrong"] == 0
    assert traffic["longest_s"] <= LATE_S
    missed = field.client.do("get", pages=PAGES)
    assert not any(missed["ok"])
    assert missed["took_s"] <= LATE_S
    assert_nothing_is_held(field.node)


def break_it(field: Field, fault: str) -> None:
    if fault == "unplugged":
        field.network.unplug("near")
    else:
        field.network.drop_to(fault)


@pytest.mark.parametrize("fault", ["unplugged", "near", "far"])
def test_a_network_that_fails_costs_misses_and_comes_back(field: Field, fault: str) -> None:
    """`fault`: the cable is out, or every packet to one of the two is lost and the others arrive."""
    fail_under_traffic(field, fault)
    field.network.heal()
    healed = time.monotonic()
    while not all((got := field.client.do("get", pages=PAGES))["ok"]):
        assert got["took_s"] <= LATE_S
        assert time.monotonic() < healed + BACK_WITHIN_S, field.node.log()
        time.sleep(0.1)
    assert got["wrong"] == 0
    traffic = field.client.do("traffic", for_s=1.0)
    assert traffic["failed"] == 0
    assert_nothing_is_held(field.node)


@pytest.mark.parametrize("busy", [True, False])
def test_a_client_host_that_vanishes_leaves_nothing_behind(field: Field, busy: bool) -> None:
    if busy:
        field.client.ask("traffic", for_s=20.0)
        time.sleep(1.0)  # in the midst of it
    assert field.node.status().connections > 1
    field.network.unplug("near")
    field.client.kill()
    assert_nothing_is_held(field.node)
    if not busy:  # an idle connection's end is told by nothing but silence
        until(lambda: field.node.status().connections == 1, VANISHED_WITHIN_S, field.node.log)  # our own
