"""The first generation of a worker, over a scripted tokenizer manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import ServerStatus

from pdserve.engine.sglang import server as module
from pdserve.engine.sglang.server import warm_up


class Manager:
    """As much of SGLang's tokenizer manager as a warm-up touches."""

    raises: Exception | None = None
    hangs = False

    def __init__(self, *, ranks: int = 1, is_generation: bool = True, mode: str = "null") -> None:
        self.elastic_worker_count = ranks
        self.is_generation = is_generation
        self.server_args = SimpleNamespace(disaggregation_mode=mode)
        self.server_status = ServerStatus.Starting
        self.asked: list[Any] = []
        self.frozen = 0

    async def generate_request(self, request: Any, _http: None) -> AsyncIterator[Any]:
        self.asked.append(request)
        if self.hangs:
            await asyncio.Event().wait()
        if self.raises is not None:
            raise self.raises
        yield {"text": "a"}

    async def freeze_gc(self) -> None:
        self.frozen += 1


async def test_each_rank_generates_before_the_worker_is_up() -> None:
    manager = Manager(ranks=2)
    await warm_up(manager)
    assert [(one.routed_dp_rank, one.bootstrap_room) for one in manager.asked] == [(0, None), (1, None)]
    assert (manager.frozen, manager.server_status) == (1, ServerStatus.Up)


async def test_a_worker_that_hands_over_directly_has_no_partner_yet() -> None:
    manager = Manager(mode="decode")
    await warm_up(manager)
    assert [(one.bootstrap_host, one.bootstrap_room) for one in manager.asked] == [("2.2.2.2", 0)]


async def test_an_embedding_model_embeds() -> None:
    manager = Manager(is_generation=False)
    await warm_up(manager)
    assert [type(one).__name__ for one in manager.asked] == ["EmbeddingReqInput"]


async def test_a_worker_whose_first_generation_fails_or_never_ends_is_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing, hanging = Manager(), Manager()
    failing.raises, hanging.hangs = ValueError("the kernel is missing"), True
    with pytest.raises(ValueError, match="the kernel is missing"):
        await warm_up(failing)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.0)
    with pytest.raises(TimeoutError, match="no token within 0 s"):
        await warm_up(hanging)
    assert {failing.server_status, hanging.server_status} == {ServerStatus.Starting}
