"""A node process that ends, hangs or comes back while a load copies its memory: right bytes, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import WeightsError
from pdserve.kvpool.admin.upgrade import upgrade
from pdserve.kvpool.transports.shm import ShmConnection
from pdserve.kvpool.weights import catalog, store, streaming
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import WeightStore
from pdserve.kvpool.weights.streaming import Filled, stream, weight_files
from tests.support.kvpool.models import MIB, ROOMY, store_of, tensors_in, tensors_of, write_model
from tests.support.kvpool.nodes import StartProcess
from tests.support.kvpool.pools import ProcessPool
from tests.support.suite.extended import extended

MODEL, OTHER = ModelName("demo", "1"), ModelName("demo", "2")
SIZES = 5 * MIB, 6 * MIB, 7 * MIB
TENSORS = tensors_of(*SIZES)
ONE_MODEL = {**ROOMY, "capacity_bytes": 32 << 20}
Event = Callable[[], None]


class Rig:
    """A node with room for one model, which it has; and what may happen to both while somebody loads it."""

    def __init__(self, start: StartProcess, directory: Path) -> None:
        self._start, self._directory = start, directory
        self.node: ProcessPool = start(**ONE_MODEL)
        self.store = store_of(self.node)
        push(self.store, write_model(directory / "model", TENSORS), MODEL)

    def kill(self) -> None:
        self.node.kill()

    def stop(self) -> None:
        self.node.close()

    def restart(self) -> None:
        self.node.kill()
        self.node.restart()

    def upgrade(self) -> None:
        upgrade(self.node.address, deadline_s=60.0)

    def restart_on_new_memory(self) -> None:
        self.node.kill()
        self.node = self._start(**{**ONE_MODEL, "capacity_bytes": 36 << 20})

    def refill(self) -> None:
        """`pdserve weights rm`, and the push of a model that takes the same memory."""
        with store_of(self.node) as by_another:
            catalog.remove(by_another, MODEL)
        self.push_another()

    def push_another(self) -> None:
        other = write_model(self._directory / "other", tensors_of(*SIZES, seed=70))
        with store_of(self.node) as by_another:
            push(by_another, other, OTHER)

    def spans(self, by: WeightStore | None = None) -> Iterator[Filled]:
        by = by or self.store
        reader, manifest = by.reader(MODEL), by.manifest(MODEL)
        return stream(reader, manifest, weight_files(reader, manifest))


@pytest.fixture(autouse=True)
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span is given out once it is read, so that the next one is read after what happens meanwhile."""
    monkeypatch.setattr(store, "PAUSE_S", 0.0)
    monkeypatch.setattr(streaming, "NEAR_BATCH_BYTES", MIB)
    monkeypatch.setattr(streaming.read_ahead, "__defaults__", (1, 2))


@pytest.fixture
def rig(start_process: StartProcess, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(start_process, tmp_path)
    yield made
    made.store.close()


def tensors_of_all(spans: list[Filled]) -> dict[str, bytes]:
    return {name: data for filled in spans for name, data in tensors_in(filled).items()}


def use(spans: Iterator[Filled]) -> None:
    """Each span is dropped before the next one comes."""
    for filled in spans:
        del filled


def after_the_first(rig: Rig, monkeypatch: pytest.MonkeyPatch, event: Event) -> Iterator[Filled]:
    """`event` happens while the first span is in use."""
    running = rig.spans()
    yield next(running)
    event()
    yield from running


def before_a_page_is_copied(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, event: Event, by: WeightStore | None = None
) -> Iterator[Filled]:
    """`event` happens after the node has named the place of a page, and before that is copied."""
    read, calls = ShmConnection.read_pages, iter(range(100))

    def late(*given: Any) -> Any:
        if next(calls) == 3:
            event()
        return read(*given)

    monkeypatch.setattr(ShmConnection, "read_pages", late)
    yield from rig.spans(by)


Moment = Callable[[Rig, pytest.MonkeyPatch, Event], Iterator[Filled]]


@pytest.mark.parametrize(
    ("moment", "ends"),
    [
        (before_a_page_is_copied, Rig.kill),
        extended(after_the_first, Rig.kill),
        extended(after_the_first, Rig.stop),
    ],
)
def test_the_memory_outlives_the_node_and_the_load_ends_with_an_error_that_names_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, moment: Moment, ends: Callable[[Rig], None]
) -> None:
    given: list[Filled] = []
    with pytest.raises(WeightsError, match=r"page [0-9a-f]{16}.* not in the pool; .*node"):
        given.extend(moment(rig, monkeypatch, lambda: ends(rig)))
    assert tensors_of_all(given).items() <= TENSORS.items()


@pytest.mark.parametrize(
    ("moment", "renew"), [extended(after_the_first, Rig.restart), (before_a_page_is_copied, Rig.upgrade)]
)
def test_a_load_goes_on_with_the_node_that_takes_over_the_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, moment: Moment, renew: Callable[[Rig], None]
) -> None:
    spans = list(moment(rig, monkeypatch, lambda: renew(rig)))
    assert tensors_of_all(spans) == TENSORS


def test_a_node_that_starts_on_new_memory_leaves_the_old_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Filled] = []

    def event() -> None:
        rig.restart_on_new_memory()
        rig.push_another()

    with pytest.raises(WeightsError, match="not in the pool"):
        given.extend(after_the_first(rig, monkeypatch, event))
    assert tensors_of_all(given).items() <= TENSORS.items()


@pytest.mark.parametrize(
    ("moment", "renew"),
    [
        extended(after_the_first, Rig.upgrade),
        extended(before_a_page_is_copied, Rig.restart),
        (before_a_page_is_copied, lambda rig: None),
    ],
    ids=["upgraded", "restarted", "same"],
)
def test_memory_that_was_filled_again_ends_the_load(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, moment: Moment, renew: Callable[[Rig], None]
) -> None:
    def event() -> None:
        renew(rig)
        rig.refill()

    with pytest.raises(WeightsError, match=r"page [0-9a-f]{16}.* not in the pool"):
        use(moment(rig, monkeypatch, event))


def test_a_node_that_hangs_ends_the_load_by_its_deadlines_and_serves_the_next_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PATIENCE", dict.fromkeys(store.PATIENCE, 0.3))
    with store_of(rig.node) as hasty, pytest.raises(WeightsError, match=r"not in the pool; .*node"):
        use(before_a_page_is_copied(rig, monkeypatch, rig.node.pause, hasty))
    rig.node.resume()
    assert tensors_of_all(list(rig.spans())) == TENSORS
