"""A process that starts late comes to the same fleet as those that saw every change."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.changes import Changes, FleetChange
from pdserve.router.config import RouterConfig
from pdserve.router.fleet import Act, Fleet, FleetError
from pdserve.router.workers import Role

URLS = [f"http://h{i}:1" for i in range(3)]
CONFIG = RouterConfig(prefill=(URLS[0],), decode=(URLS[1],))
ACTS = st.tuples(
    st.sampled_from(["join", "leave", "drain", "undrain"]),
    st.sampled_from(URLS),
    st.sampled_from(["prefill", "decode"]),
)


def members(fleet: Fleet) -> dict[str, tuple[Role, bool]]:
    return {worker.id: (worker.role, worker.drained) for worker in fleet.workers}


@given(st.lists(ACTS, max_size=12))
def test_replayed_changes_make_the_same_fleet(acts: list[tuple[Act, str, Role]]) -> None:
    changes, fleet, late = Changes(), Fleet.from_config(CONFIG), Fleet.from_config(CONFIG)
    fleet.told = lambda act, worker, role: changes.note(FleetChange(act, worker, role))
    for act, url, role in acts:
        with suppress(FleetError):
            FleetChange(act, url if act == "join" else url.removeprefix("http://"), role).apply(fleet)
    for change in changes:
        with suppress(FleetError):
            change.apply(late)
    assert members(late) == members(fleet)


def test_a_configuration_read_anew_brings_back_what_it_lists() -> None:
    changes = Changes()
    for change in (
        FleetChange("leave", "h1:1"),
        FleetChange("join", URLS[2], "decode"),
        FleetChange("drain", "h2:1"),
    ):
        changes.note(change)
    changes.configured()
    late = Fleet.from_config(CONFIG)
    for change in changes:
        change.apply(late)
    assert members(late) == {"h0:1": ("prefill", False), "h1:1": ("decode", False), "h2:1": ("decode", True)}
