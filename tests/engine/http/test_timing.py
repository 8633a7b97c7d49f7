"""What SGLang says with the first token is told and counted, against a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.http.timing import FirstToken, WorkerMetrics, first_token
from pdserve.engine.sglang.request_tracking import RequestTracking

META = {
    "queue_time": 0.5,
    "storage_prefetch_wait": 0.2,
    "forward_entry_time": 1000.0,
    "prefill_finished_time": 1000.25,
}


def test_the_wait_for_pages_is_part_of_sglangs_queue_and_told_apart() -> None:
    first = first_token([{"meta_info": META}, {"meta_info": {}}])
    assert first == FirstToken({"queue": pytest.approx(0.3), "pull": 0.2, "compute": 0.25})
    assert first.timing() == b"queue;dur=300.0, pull;dur=200.0, compute;dur=250.0"


@pytest.mark.parametrize("meta", [{}, {"storage_prefetch_wait": None, "queue_time": None}])
def test_what_sglang_does_not_say_is_nothing(meta: dict[str, Any]) -> None:
    assert first_token([{"meta_info": meta}]) == FirstToken({"queue": 0.0, "pull": 0.0})


class Manager:
    """A tokenizer manager whose every request is answered in two steps, for two prompts of 100 tokens, of
    which 64 were cached.
    """

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.closed = 0

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        self.rid_to_state = dict.fromkeys(obj.rid)

    async def _send_one_request(self, tokenized: Any) -> None: ...

    async def _send_batch_request(self, tokenized: Any) -> None: ...

    async def _handle_batch_output(self, output: Any) -> None: ...

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.rid, obj.batch_size = ["a", "b"], 2
        self._init_req_state(obj)
        for rid in obj.rid:
            await self._send_one_request(SimpleNamespace(rid=rid, input_ids=None, mm_inputs=None))
        details = [{"device": 64, "host": 0}] * 2
        await self._handle_batch_output(
            SimpleNamespace(
                rids=obj.rid, prompt_tokens=[100, 100], cached_tokens=[64, 64], cached_tokens_details=details
            )
        )
        try:
            yield {"text": "a", "meta_info": META}
            yield {"text": "ab", "meta_info": {**META, "queue_time": 9.0}}
        finally:
            self.closed += 1


def asked(manager: Manager, metrics: WorkerMetrics, steps: int) -> list[Any]:
    """The messages of an app that streams what the engine says, so many steps of it."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        contents = manager.generate_request(SimpleNamespace(rid=None))
        for _ in range(steps):
            content = await anext(contents)
            await send({"type": "http.response.body", "body": content["text"].encode(), "more_body": True})
        await contents.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        scope = {"type": "http", "path": "/generate", "headers": []}
        await RequestTracking(app, lambda: manager, metrics=metrics)(scope, receive, send)

    asyncio.run(main())
    return sent


def test_the_head_of_a_stream_says_what_the_first_step_said_and_it_is_counted_once() -> None:
    metrics = WorkerMetrics()
    sent = asked(Manager(), metrics, steps=2)
    assert sent[0]["headers"] == [
        (b"a", b"b"),
        (b"x-pdserve-cached", b"device=128, host=0, pool=0, ssd=0, computed=72"),
        (b"server-timing", b"queue;dur=300.0, pull;dur=200.0, compute;dur=250.0"),
    ]
    assert [message.get("body") for message in sent[1:]] == [b"a", b"ab", b""]
    [family] = metrics._tokens.collect()
    tokens = {s.labels["tier"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert tokens == {"device": 128, "host": 0, "pool": 0, "ssd": 0, "computed": 72}


def test_a_reader_that_leaves_ends_the_engines_request() -> None:
    manager = Manager()
    asked(manager, WorkerMetrics(), steps=1)
    assert manager.closed == 1
