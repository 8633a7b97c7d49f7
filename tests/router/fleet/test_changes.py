"""A process that starts late comes to the same fleet as those that saw every change."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.changes import Changes, FleetChange
from pdserve.router.fleet.membership import Act, FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role, Worker

URLS = [f"http://h{i}:1" for i in range(3)]
CONFIG = RouterConfig(prefill=(URLS[0],), decode=(URLS[1],))


IDS = [url.removeprefix("http://") for url in URLS]
FOUND = ["http://h9:1", URLS[2]]
"""What etcd may name."""
EVENTS = st.one_of(
    st.tuples(
        st.sampled_from(["join", "leave", "drain", "undrain"]),
        st.sampled_from([URLS[1], *FOUND]),
        st.just("decode"),
    ),
    st.sets(st.sampled_from(FOUND)),
)


def members(fleet: Fleet) -> dict[str, tuple[Role, bool]]:
    return {worker.id: (worker.role, worker.drained) for worker in fleet.workers}


def name_in_etcd(fleet: Fleet, urls: Iterable[str]) -> None:
    """As discovery does: what would be refused is left out."""
    named: dict[str, Role] = {}
    for url in urls:
        with suppress(FleetError):
            fleet.members.check("etcd", Worker("decode", url))
            named[url] = "decode"
    fleet.members.sync("etcd", named)


@given(st.lists(EVENTS, max_size=12), st.booleans())
@example([{URLS[2]}, ("drain", URLS[2], "decode"), set(), {URLS[2]}], False)
@example([{URLS[2]}, ("leave", URLS[2], "decode"), set(), {URLS[2]}], False)
@example([{URLS[2]}, ("drain", URLS[2], "decode")], True)
@example([{URLS[2]}, ("leave", URLS[2], "decode")], True)
@example([{URLS[2]}, *[(act, URLS[2], "decode") for act in ("leave", "join", "leave")]], False)
@example(
    [
        {URLS[2]},
        ("leave", URLS[2], "decode"),
        ("join", URLS[2], "decode"),
        set(),
        ("leave", URLS[2], "decode"),
        {URLS[2]},
    ],
    False,
)
@example([("join", URLS[2], "decode"), ("leave", URLS[2], "decode"), {URLS[2]}], False)
def test_every_process_comes_to_the_same_fleet_whatever_etcd_names(
    events: list[tuple[Act, str, Role] | set[str]], etcd_was_away: bool
) -> None:
    changes, one, other = Changes(), Fleet.from_config(CONFIG), Fleet.from_config(CONFIG)

    def tell(act: Act, worker: str, role: Role) -> None:
        changes.note(FleetChange(act, worker, role))
        if act != "gone":
            FleetChange(act, worker, role).follow(other)

    one.members.told = tell
    other.members.told = lambda act, worker, role: changes.note(FleetChange(act, worker, role))
    named: set[str] = set()
    for event in events:
        if isinstance(event, set):
            named = event
            name_in_etcd(one, named)
            name_in_etcd(other, named)
            continue
        act, url, _ = event
        with suppress(FleetError):
            FleetChange(act, url if act == "join" else url.removeprefix("http://"), "decode").apply(one)
    late = Fleet.from_config(CONFIG)
    if not etcd_was_away:
        name_in_etcd(late, named)
    for change in changes:
        change.follow(late)
    for fleet in (one, other, late):
        name_in_etcd(fleet, named)
    assert members(one) == members(other) == members(late)


def test_a_configuration_read_anew_brings_back_what_it_lists() -> None:
    changes = Changes()
    for change in (
        FleetChange("leave", IDS[1]),
        FleetChange("leave", "etcd:1"),
        FleetChange("join", URLS[2], "decode"),
        FleetChange("drain", IDS[2]),
        FleetChange("drain", IDS[0]),
        FleetChange("drain", "delisted:1"),
    ):
        changes.note(change)
    coming = changes.configured({*IDS[:2], "delisted:1"}, IDS[:2])
    late = Fleet.from_config(CONFIG)
    for change in coming:
        change.follow(late)
    assert members(late) == {IDS[0]: ("prefill", True), IDS[1]: ("decode", False), IDS[2]: ("decode", True)}
    assert FleetChange("leave", "etcd:1") in coming
    assert FleetChange("drain", "delisted:1") not in coming
    assert FleetChange("leave", IDS[1]) in changes  # until the reload has succeeded
