"""The first generation of a worker, over a scripted tokenizer manager."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import ServerStatus

from pdserve.engine.sglang.warm_up import WarmUp

WAIT_S = 10.0


class Manager:
    """As much of SGLang's tokenizer manager as a warm-up touches."""

    def __init__(self, *, ranks: int = 1, is_generation: bool = True, mode: str = "null") -> None:
        self.elastic_worker_count = ranks
        self.is_generation = is_generation
        self.server_args = SimpleNamespace(disaggregation_mode=mode)
        self.server_status = ServerStatus.Starting
        self.asked: list[Any] = []
        self.frozen = 0
        self.raises: Exception | None = None
        self.hangs = False

    async def generate_request(self, request: Any, _http: None) -> AsyncIterator[Any]:
        self.asked.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        if self.raises is not None:
            raise self.raises
        yield {"text": "a"}

    async def freeze_gc(self) -> None:
        self.frozen += 1


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs in a thread, as the server's does beside the warm-up."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_others_ended(), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


async def _others_ended() -> None:
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


def warmed(manager: Manager, is_stopping: Callable[[], bool] = lambda: False) -> list[str]:
    """Warm it up; how often it became ready."""
    ready: list[str] = []
    with event_loop() as loop:
        warm_up = WarmUp(is_stopping, lambda: ready.append("ready"))
        loop.call_soon_threadsafe(warm_up.listening)
        warm_up.run(manager)
    return ready


def test_each_rank_generates_before_the_worker_is_ready() -> None:
    manager = Manager(ranks=2)
    assert warmed(manager) == ["ready"]
    assert [one.routed_dp_rank for one in manager.asked] == [0, 1]
    assert {one.bootstrap_room for one in manager.asked} == {None}
    assert manager.frozen == 1
    assert manager.server_status is ServerStatus.Up


def test_a_worker_that_hands_over_directly_has_no_partner_yet() -> None:
    manager = Manager(mode="decode")
    assert warmed(manager) == ["ready"]
    assert [(one.bootstrap_host, one.bootstrap_room) for one in manager.asked] == [("2.2.2.2", 0)]


def test_an_embedding_model_embeds() -> None:
    manager = Manager(is_generation=False)
    assert warmed(manager) == ["ready"]
    assert [type(one).__name__ for one in manager.asked] == ["EmbeddingReqInput"]


def test_nothing_is_asked_before_the_server_listens() -> None:
    manager, ready = Manager(), threading.Event()
    warm_up = WarmUp(lambda: False, ready.set)
    with event_loop() as loop, ThreadPoolExecutor() as threads:
        running = threads.submit(warm_up.run, manager)
        assert manager.asked == []
        loop.call_soon_threadsafe(warm_up.listening)
        running.result(WAIT_S)
    assert ready.is_set()


def test_a_first_generation_that_fails_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        ended.append(number)

    before = signal.signal(signal.SIGQUIT, note)
    try:
        manager = Manager()
        manager.raises = ValueError("the kernel is missing")
        assert warmed(manager) == []
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert ended == [signal.SIGQUIT]
    assert "the kernel is missing" in caplog.text
    assert manager.server_status is ServerStatus.Starting


@pytest.mark.parametrize("hangs", [False, True])
def test_the_end_of_the_server_ends_the_warm_up(hangs: bool) -> None:
    manager = Manager()
    manager.hangs = hangs
    assert warmed(manager, is_stopping=lambda: bool(manager.asked)) == []
    assert manager.server_status is ServerStatus.Starting


def test_a_server_that_ends_before_it_listens_ends_the_warm_up() -> None:
    WarmUp(lambda: True, lambda: pytest.fail("it is not ready")).run(Manager())
