"""Acts of administrators, and metrics, in the runtime directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.membership import NONE, FleetError, Order, after_reload
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role
from pdserve.router.metrics.stats import Histogram, Snapshot
from pdserve.router.sharing.files import Acts, ActsFile, MetricsFiles, ids_of

URLS = [f"http://h{i}:1" for i in range(3)]
IDS = [url.removeprefix("http://") for url in URLS]
CONFIG = RouterConfig(prefill=(URLS[0],), decode=(URLS[1],))
FOUND = ["http://h9:1", URLS[2]]
"""What etcd may name."""
PROCESSES = st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(
        st.sampled_from(["join", "leave", "drain", "undrain"]),
        st.sampled_from([URLS[1], *FOUND]),
        PROCESSES,
    ),
    st.sets(st.sampled_from(FOUND)),
)


class Process:
    """A router process, as far as acts of administrators go."""

    def __init__(self, directory: Path, named: Iterable[str] | None = None) -> None:
        """`named`: what etcd names as it starts; None: etcd is away."""
        self.acts, self.fleet = ActsFile(directory), Fleet.from_config(CONFIG)
        orders = self.acts.read().orders
        if named is not None:
            self.name_in_etcd(named)
        self.fleet.members.take(orders)
        self.fleet.members.told = self.acts.order

    def look(self) -> None:
        if (acts := self.acts.changed()) is not None:
            self.fleet.members.take(acts.orders)

    def name_in_etcd(self, urls: Iterable[str]) -> None:
        self.fleet.members.sync("etcd", dict.fromkeys(urls, "decode"))

    def do(self, act: str, url: str) -> None:
        members, id_ = self.fleet.members, url.removeprefix("http://")
        with suppress(FleetError):
            if act == "join":
                members.join(url, "decode")
            elif act == "leave":
                members.leave(id_)
            else:
                members.drain(id_, act == "drain")

    @property
    def members(self) -> dict[str, tuple[Role, bool]]:
        return {worker.id: (worker.role, worker.drained) for worker in self.fleet.workers}


@given(st.lists(EVENTS, max_size=12), st.booleans())
@example([{URLS[2]}, ("drain", URLS[2], 0), set(), {URLS[2]}], False)
@example([{URLS[2]}, ("leave", URLS[2], 0), set(), {URLS[2]}], False)
@example([{URLS[2]}, ("drain", URLS[2], 0)], True)
@example([{URLS[2]}, ("leave", URLS[2], 0)], True)
@example([{URLS[2]}, *[(act, URLS[2], 0) for act in ("leave", "join", "leave")]], False)
@example([("join", URLS[2], 0), ("leave", URLS[2], 1), {URLS[2]}], False)
def test_every_process_comes_to_the_same_fleet_whatever_etcd_names(
    events: list[tuple[str, str, int] | set[str]], etcd_was_away: bool
) -> None:
    """Also one that starts late, and whoever of them is told."""
    with TemporaryDirectory() as path:
        directory = Path(path)
        processes = Process(directory), Process(directory)
        named: set[str] = set()
        for event in events:
            if isinstance(event, set):
                named = event
                for process in processes:
                    process.name_in_etcd(named)
            else:
                act, url, number = event
                processes[number].do(act, url)
            for process in processes:
                process.look()
        late = Process(directory, None if etcd_was_away else named)
        for process in (*processes, late):
            process.name_in_etcd(named)
            process.look()
        assert processes[0].members == processes[1].members == late.members


def test_an_order_ends_with_the_worker_that_it_is_about_and_who_comes_then_is_another_one(
    tmp_path: Path,
) -> None:
    here, there = Process(tmp_path), Process(tmp_path)
    for process in (here, there):
        process.name_in_etcd(FOUND)
    before = here.fleet.by_id[IDS[2]]
    here.do("leave", URLS[2])
    here.do("drain", FOUND[0])
    there.look()
    assert {*there.members} == {*IDS[:2], "h9:1"}
    for named in ([FOUND[0]], FOUND, [URLS[2]], FOUND):
        for process in (here, there):
            process.name_in_etcd(named)
            process.look()
    assert here.members == there.members
    assert here.members[IDS[2]] == here.members["h9:1"] == ("decode", False)
    assert here.fleet.by_id[IDS[2]] is not before
    here.do("leave", URLS[1])
    removed = here.fleet.by_id.get(IDS[1])
    there.acts.change(lambda acts: Acts({}, 0))
    here.look()
    assert removed is None
    assert IDS[1] in here.members


def test_of_acts_at_once_the_later_one_counts_everywhere_and_none_is_lost(tmp_path: Path) -> None:
    here, there = Process(tmp_path), Process(tmp_path)
    here.do("drain", URLS[1])
    there.do("leave", URLS[1])
    here.do("drain", URLS[0])
    there.acts.change(lambda acts: Acts(acts.orders, acts.keys + 1))  # the keys are to be read again
    for process in (here, there):
        process.look()
    assert here.members == there.members == {IDS[0]: ("prefill", True)}
    assert here.acts.changed() is None
    here.acts.order(IDS[0], NONE)
    acts = there.acts.changed()
    assert acts is not None
    assert (list(acts.orders), acts.keys) == ([IDS[1]], 1)
    with (tmp_path / "acts.lock").open("w") as held:  # by a process that was stopped just then
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            here.acts.order(IDS[1], NONE)
    here.acts.order(IDS[1], NONE)


def test_a_configuration_read_anew_brings_back_what_it_lists() -> None:
    drained, removed = Order(is_drained=True), Order(is_removed=True)
    joined = Order(URLS[2], "decode", is_drained=True)
    orders = {
        IDS[0]: drained,
        IDS[1]: removed,
        IDS[2]: joined,
        "etcd:1": removed,
        "delisted:1": drained,
        "other:1": drained,
    }
    assert after_reload(orders, {*IDS[:2], "delisted:1"}, ids_of(CONFIG)) == {
        IDS[0]: drained,
        IDS[2]: joined,
        "etcd:1": removed,
        "other:1": drained,
    }


# --- metrics


def counted(requests: int, refused: bool = False) -> Snapshot:
    histogram = Histogram()
    for _ in range(requests):
        histogram.observe(1.0)
    return Snapshot(
        {
            "requests": {("/", "200"): requests},
            "requests_in_flight": {(): 1},
            "worker_refused": {("w:1", "decode"): float(refused)},
        },
        {"first_token_seconds": {("queue",): histogram}},
    )


def test_the_metrics_of_all_processes_are_added_up_and_those_of_ended_ones_stay(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path)
    assert files.add_up("a", counted(1), 0).total("requests") == 1
    files.write("a", counted(1))
    files.write("b", counted(10))
    files.write("c", counted(100, refused=True))
    total = files.add_up("a", counted(2), 1)
    assert (total.total("requests"), total.total("requests_in_flight"), total.is_whole) == (112, 3, False)
    assert files.refused() == {"w:1"}
    files.fold("c")
    files.fold("killed before it had written")
    total = files.add_up("a", counted(2), 0)
    assert (total.total("requests"), total.total("requests_in_flight"), total.is_whole) == (112, 2, True)
    assert sum(total.histograms["first_token_seconds"][("queue",)].counts) == 112
    assert files.refused() == set()


def test_a_process_that_ends_while_one_adds_up_is_counted_once_and_a_broken_file_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, parent = MetricsFiles(tmp_path), MetricsFiles(tmp_path)
    (tmp_path / "a.metrics").write_bytes(b"\xc1")
    for name in "bc":
        files.write(name, counted(10))
    read = files.read

    def reading(name: str) -> Snapshot | None:
        found = read(name)
        if name == "b":
            parent.fold("b")
        return found

    monkeypatch.setattr(files, "read", reading)
    assert files.add_up("me", counted(1), 0).total("requests") == 21
