"""New weights in a running worker: which steps are done in which order, and which namespace they get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from pdserve.engine import weights as module
from pdserve.engine.http.held import Door
from pdserve.engine.weights import Weights
from pdserve.errors import RequestError, StartupError
from pdserve.pages import KvGeometry

GEOMETRY = KvGeometry(
    model="old",
    dtype="d",
    kv_dtype="d",
    page_size="64",
    layout="l",
    tp_size="1",
    pp_size="1",
    options="a=1,b=2",
)


class Engine:
    """Scripted: `busy` times a step is refused."""

    def __init__(self, steps: list[str]) -> None:
        self.door = Door(wait_s=0.01)
        self.unfinished = 0
        self.steps = steps
        self.refuses: dict[str, int] = {}
        self.attached: Mapping[str, Any] = {}

    def abort_all(self) -> None:
        self.steps.append("abort")
        self.unfinished = 0

    async def flush(self) -> str:
        return self._step("flush")

    async def detach_storage(self) -> str:
        return self._step("detach")

    async def attach_storage(self, extra_config: Mapping[str, Any]) -> str:
        self.attached = extra_config
        return self._step("attach")

    def keep_name(self) -> None:
        self.steps.append("name")

    def _step(self, name: str) -> str:
        self.steps.append(f"{name}{'' if self.door.is_open else ', shut'}")
        self.refuses[name] = self.refuses.get(name, 0) - 1
        return "it is busy" if self.refuses[name] >= 0 else ""


class Pool:
    def __init__(self, steps: list[str]) -> None:
        self.namespace = GEOMETRY.namespace("m")
        self.steps = steps

    def use(self, namespace: str, geometry: dict[str, str]) -> None:
        self.steps.append("use")
        self.namespace = namespace


class Rig:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.engine, self.pool = Engine(self.steps), Pool(self.steps)
        self.prints = {"/new": "new", "/old": "old"}
        reached: Any = self.pool
        self.weights = Weights(
            self.engine,
            reached,
            GEOMETRY,
            name="m",
            storage_of=lambda namespace, geometry: {"namespace": namespace, "geometry": geometry},
            fingerprint=self.fingerprint,
        )

    def fingerprint(self, path: str) -> str:
        if str(path) not in self.prints:
            raise StartupError("no model")
        return self.prints[str(path)]

    async def update(self, path: str | None, *, done: bool = True) -> None:
        await self.weights.replacing(path)
        self.weights.replaced(done)

    @property
    def geometry(self) -> KvGeometry:
        """What the backend is attached with."""
        found: KvGeometry = self.engine.attached["geometry"]
        return found


def run(main: Callable[[Rig], Coroutine[Any, Any, None]]) -> Rig:
    async def started() -> Rig:
        rig = Rig()
        await asyncio.wait_for(main(rig), 20.0)
        return rig

    return asyncio.run(started())


def test_the_pool_is_detached_while_nothing_runs_and_attached_under_the_new_name_before_anything_does() -> (
    None
):
    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        assert rig.weights.is_held
        await rig.update("/new")
        await rig.weights.release()
        assert not rig.weights.is_held

    rig = run(main)
    assert rig.steps == ["detach, shut", "name", "flush, shut", "use", "attach, shut"]
    assert rig.engine.door.is_open
    assert (rig.geometry.model, rig.geometry.options) == ("new", "a=1,b=2")
    assert rig.engine.attached["namespace"] == rig.pool.namespace == rig.geometry.namespace("m")
    assert rig.weights.earlier == [GEOMETRY.namespace("m")]


def test_weights_that_were_there_before_get_their_namespace_back() -> None:
    async def main(rig: Rig) -> None:
        for path in ("/new", "/old"):
            await rig.weights.hold()
            await rig.update(path)
            await rig.weights.release()

    rig = run(main)
    assert rig.pool.namespace == GEOMETRY.namespace("m")
    assert rig.weights.earlier != [GEOMETRY.namespace("m")]


def test_a_held_worker_that_is_released_as_it_was_keeps_pages_and_caches() -> None:
    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        await rig.weights.release("x")

    rig = run(main)
    assert rig.steps == ["detach, shut", "attach, shut"]
    assert rig.geometry == GEOMETRY
    assert rig.weights.earlier == []


def named_after(updates: list[tuple[str | None, bool]], id_: str) -> KvGeometry:
    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        for path, done in updates:
            await rig.update(path, done=done)
        await rig.weights.release(id_)

    return run(main).geometry


def test_weights_from_elsewhere_are_named_after_what_all_workers_are_told() -> None:
    for updates in ([(None, True)], [("/new", True), (None, True)], [("/new", True), ("/old", True)]):
        named = named_after(updates, "v7")
        assert (named.model, named.options) == ("old", "a=1,b=2,weights=v7")
        assert named == named_after(updates, "v7")
        assert named_after(updates, "") != named_after(updates, "")


@pytest.mark.parametrize(
    "updates", [[("/new", False)], [(None, True), (None, False)], [(None, False), (None, True)]]
)
def test_what_failed_half_way_shares_its_pages_with_nobody(updates: list[tuple[str | None, bool]]) -> None:
    first, second = named_after(updates, "v7"), named_after(updates, "v7")
    assert len({first.options, second.options, GEOMETRY.options, "a=1,b=2,weights=v7"}) == 4


def test_a_directory_that_changes_while_it_is_read_gives_its_pages_no_name() -> None:
    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        await rig.weights.replacing("/new")
        rig.prints["/new"] = "newer"
        rig.weights.replaced(True)
        await rig.weights.release("v7")

    named = run(main).geometry
    assert named.model == "old"
    assert named.options.startswith("a=1,b=2,weights=")
    assert not named.options.endswith("v7")


def test_a_second_update_does_not_keep_the_first_ones_tag() -> None:
    async def main(rig: Rig) -> None:
        for id_ in ("v1", "v2"):
            await rig.weights.hold()
            await rig.update(None)
            await rig.weights.release(id_)

    assert run(main).geometry.options == "a=1,b=2,weights=v2"


def test_requests_that_run_keep_the_worker_as_it_is_unless_they_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(rig: Rig) -> None:
        rig.engine.unfinished = 2
        with pytest.raises(RequestError, match="2 requests still run") as refused:
            await rig.weights.hold(timeout_s=0.01)
        assert refused.value.status == 409
        assert rig.engine.door.is_open
        assert rig.steps == []
        await rig.weights.hold(abort=True)

    assert run(main).steps == ["abort", "detach, shut"]


def test_storage_that_stays_is_left_attached_and_requests_go_on() -> None:
    async def main(rig: Rig) -> None:
        rig.engine.refuses["detach"] = 1000
        with pytest.raises(RequestError, match="keeps its storage"):
            await rig.weights.hold(timeout_s=0.01)
        assert not rig.weights.is_held
        await rig.engine.door.passed()

    assert run(main).steps[-1] == "attach, shut"


def test_an_engine_that_breaks_shuts_nobody_out() -> None:
    async def main(rig: Rig) -> None:
        async def broken() -> str:
            raise OSError("the scheduler is gone")

        rig.engine.detach_storage = broken  # type: ignore[method-assign]
        with pytest.raises(OSError, match="scheduler"):
            await rig.weights.hold()
        await rig.engine.door.passed()

    run(main)


def test_pages_on_their_way_are_waited_for() -> None:
    async def main(rig: Rig) -> None:
        rig.engine.refuses["detach"] = 3
        await rig.weights.hold()

    assert run(main).steps == ["detach, shut"] * 4


def test_caches_that_cannot_be_emptied_let_no_request_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.01)

    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        await rig.update("/new")
        rig.engine.refuses["flush"] = 1000
        with pytest.raises(RequestError, match="start this worker again"):
            await rig.weights.release()
        assert rig.weights.is_held
        with pytest.raises(RequestError, match="being replaced"):
            await rig.engine.door.passed()

    run(main)


def test_a_pool_that_cannot_be_attached_is_said_and_the_worker_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.01)

    async def main(rig: Rig) -> None:
        await rig.weights.hold()
        await rig.update("/new")
        rig.engine.refuses["attach"] = 1000
        with pytest.raises(RequestError, match="serves, but without the pool"):
            await rig.weights.release()
        await rig.engine.door.passed()
        assert rig.pool.namespace != GEOMETRY.namespace("m")

    run(main)


def test_a_step_out_of_order_is_refused() -> None:
    async def main(rig: Rig) -> None:
        with pytest.raises(RequestError, match="is not held"):
            await rig.weights.release()
        await rig.weights.hold()
        with pytest.raises(RequestError, match="held already"):
            await rig.weights.hold()
        with pytest.raises(RequestError, match="no local directory"):
            await rig.weights.check("org/model")
        with pytest.raises(RequestError, match="no namespace of"):
            await rig.weights.drop("others")

    run(main)


def test_a_caller_that_leaves_does_not_stop_a_step_half_way() -> None:
    async def main(rig: Rig) -> None:
        rig.engine.refuses["detach"] = 2
        holding = asyncio.create_task(rig.weights.hold())
        while not rig.steps:  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0)
        holding.cancel()
        while not rig.weights.is_held:  # noqa: ASYNC110  nothing announces it
            await asyncio.sleep(0.01)
        assert not rig.engine.door.is_open

    run(main)


def test_requests_wait_while_the_door_is_shut() -> None:
    async def main() -> None:
        door = Door(wait_s=10.0)
        await door.passed()
        door.shut()
        waiting = asyncio.create_task(door.passed())
        await asyncio.sleep(0)
        assert not waiting.done()
        door.open()
        await waiting

    asyncio.run(main())
