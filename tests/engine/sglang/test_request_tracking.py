"""Request tracking and aborts, around a scripted stand-in for SGLang's tokenizer manager and app."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from pdserve.engine.sglang.request_tracking import HttpRequest, RequestTracking


@dataclass
class State:
    dispatched: bool = False
    finished: bool = False
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Obj:
    rid: Any
    input_ids: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    mm_inputs: Any = None


class Manager:
    """The part of SGLang's TokenizerManager that the tracking wraps."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, State] = {}
        self.aborted: list[str] = []

    def _init_req_state(self, obj: Obj, request: Any = None) -> None:
        for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
            self.rid_to_state[rid] = State()

    async def _send_one_request(self, tokenized: Obj) -> None:
        self.rid_to_state[tokenized.rid].dispatched = True
        tokenized.input_ids = b"pickled"

    async def _send_batch_request(self, tokenized: list[Obj]) -> None:
        for one in tokenized:
            await Manager._send_one_request(self, one)

    async def _handle_batch_output(self, output: Any) -> None:
        self.said = output.cached_tokens

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj, request)
        for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
            await self._send_one_request(Obj(rid, [1]))
        yield {"text": "a", "meta_info": {}}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


class Client:
    """A connection: what the client sends, and its leaving."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        return


def scope(path: str = "/generate", request_id: bytes = b"id-1") -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": [(b"x-request-id", request_id)]}


def test_prompt_tokens_are_recorded_before_sglang_encodes_them() -> None:
    manager, started = Manager(), []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj(["a", "b"]))
        await manager._send_batch_request([Obj("a", [1, 2], "key", "salt"), Obj("b", [3])])

    async def run() -> HttpRequest:
        client = Client()
        await RequestTracking(app, lambda: manager, started.append)(scope(), client.messages.get, client.send)
        return started[0]

    request = asyncio.run(run())
    assert request.request_id == "id-1"
    assert [made.input_ids for made in request.requests.values()] == [[1, 2], [3]]
    assert (request.requests["a"].extra_key, request.requests["a"].cache_salt) == ("key", "salt")
    assert request.answered.is_set()
    assert manager.aborted == []


def test_a_client_that_leaves_while_sglang_computes_aborts_its_requests_at_once() -> None:
    manager = Manager()
    client = Client()
    aborted = asyncio.Event()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj("a"))
        await manager._send_one_request(Obj("a", [1]))
        client.leave()
        # SGLang computes and looks at the connection only now and then
        assert (await receive())["type"] == "http.disconnect"
        aborted.set()

    async def run() -> None:
        await RequestTracking(app, lambda: manager)(scope(), client.messages.get, client.send)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert manager.aborted == ["a"]


def test_a_client_that_leaves_during_tokenisation_aborts_the_request_once_it_is_sent() -> None:
    manager = Manager()
    client = Client()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj("a"))
        client.leave()
        assert (await receive())["type"] == "http.disconnect"
        assert manager.aborted == []  # the scheduler would not know it yet, and would run it later
        await manager._send_one_request(Obj("a", [1]))

    async def run() -> None:
        await RequestTracking(app, lambda: manager)(scope(), client.messages.get, client.send)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert manager.aborted == ["a"]


def test_the_end_of_an_answer_is_no_client_that_left() -> None:
    """uvicorn reports a disconnect once the last byte is sent, while a streaming app is still ending."""
    manager, started = Manager(), []
    client = Client()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj("a"))
        await manager._send_one_request(Obj("a", [1]))
        manager.rid_to_state["a"].finished = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert (await receive())["type"] == "http.disconnect"

    async def send(message: Any) -> None:
        client.leave()

    async def run() -> None:
        await RequestTracking(app, lambda: manager, started.append)(scope(), client.messages.get, send)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert not started[0].left.is_set()
    assert not started[0].cut_short


def test_a_client_that_leaves_after_the_last_token_cuts_nothing_short() -> None:
    manager, started = Manager(), []
    client = Client()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj(["first-of-n", "a"]))  # SGLang never sends the first when n > 1
        await manager._send_one_request(Obj("a", [1]))
        manager.rid_to_state["a"].finished = True
        client.leave()
        await receive()

    async def run() -> None:
        await RequestTracking(app, lambda: manager, started.append)(scope(), client.messages.get, client.send)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert started[0].left.is_set()
    assert not started[0].cut_short
    assert manager.aborted == []


def test_a_disconnect_is_told_to_everyone_who_asks() -> None:
    manager = Manager()
    client = Client()

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        client.leave()
        assert [(await receive())["type"] for _ in range(3)] == ["http.disconnect"] * 3

    async def run() -> None:
        await RequestTracking(app, lambda: manager)(scope(), client.messages.get, client.send)

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_request_is_answered_even_when_reading_its_connection_failed() -> None:
    manager, started = Manager(), []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)

    async def receive() -> dict[str, Any]:
        raise OSError("broken")

    async def run() -> None:
        with contextlib.suppress(OSError):
            await RequestTracking(app, lambda: manager, started.append)(scope(), receive, Client().send)

    asyncio.run(run())
    assert started[0].answered.is_set()


def test_pages_are_named_as_the_scheduler_names_them() -> None:
    manager, started = Manager(), []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        manager._init_req_state(Obj(["lora", "both", "salt", "image"]))
        await manager._send_batch_request(
            [
                Obj("lora", [1], lora_id="L"),
                Obj("both", [1], extra_key="K", lora_id="L"),
                Obj("salt", [1], cache_salt=""),
                Obj("image", [1], mm_inputs=object()),
            ]
        )

    async def run() -> None:
        client = Client()
        await RequestTracking(app, lambda: manager, started.append)(scope(), client.messages.get, client.send)

    asyncio.run(run())
    named = {rid: (m.input_ids, m.extra_key, m.cache_salt) for rid, m in started[0].requests.items()}
    assert named == {
        "lora": ([1], "L", None),
        "both": ([1], "KL", None),
        "salt": ([1], None, None),
        "image": (None, None, None),
    }


def test_requests_of_two_connections_do_not_mix() -> None:
    manager, started = Manager(), []
    both = asyncio.Barrier(2)

    async def app(scope_: Any, receive: Any, send: Any) -> None:
        await receive()
        rid = scope_["headers"][0][1].decode()
        await both.wait()
        manager._init_req_state(Obj(rid))
        await both.wait()
        await manager._send_one_request(Obj(rid, [len(rid)]))

    async def run() -> None:
        tracking = RequestTracking(app, lambda: manager, started.append)
        clients = [Client(), Client()]
        await asyncio.gather(
            *(
                tracking(scope(request_id=name), client.messages.get, client.send)
                for name, client in zip([b"x", b"yy"], clients, strict=True)
            )
        )

    asyncio.run(run())
    assert {r.request_id: {rid: m.input_ids for rid, m in r.requests.items()} for r in started} == {
        "x": {"x": [1]},
        "yy": {"yy": [2]},
    }


def test_other_routes_pass_untouched() -> None:
    seen: list[Any] = []

    async def app(scope_: Any, receive: Any, send: Any) -> None:
        seen.append(receive)

    async def receive() -> dict[str, Any]:
        raise AssertionError("not read by the middleware")

    tracking = RequestTracking(app, Manager)
    asyncio.run(tracking(scope("/health"), receive, Client().send))
    assert seen == [receive]


def test_what_was_found_cached_is_told_in_the_head_and_what_prefill_found_in_the_answer() -> None:
    """SGLang sends a stream's head before it knows anything: it waits for the first piece of the body."""
    manager, sent = Manager(), []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj("a"))
        await manager._send_one_request(Obj("a", [1]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        assert sent == []
        output = SimpleNamespace(
            rids=["a"],
            prompt_tokens=[65],
            cached_tokens=[64],
            cached_tokens_details=[{"device": 0, "host": 0, "storage": 64}],
        )
        await manager._handle_batch_output(output)
        await send({"type": "http.response.body", "body": b"x"})

    async def keep(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        asked = scope()
        asked["headers"].append((b"x-pdserve-prefilled", b"3/0/0"))
        await RequestTracking(app, lambda: manager)(asked, Client().messages.get, keep)

    asyncio.run(run())
    assert manager.said == [3]
    assert sent[0]["headers"] == [
        (b"a", b"b"),
        (b"x-pdserve-cached", b"device=0, host=0, pool=64, ssd=0, computed=1"),
    ]
    assert sent[1]["body"] == b"x"


def test_a_stream_is_answered_with_its_last_piece_though_sglang_returns_later() -> None:
    """SGLang sleeps for 2 s behind a stream; the next turn's pages are waited for from its end on."""
    started: list[HttpRequest] = []
    tracking: list[RequestTracking] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        manager._init_req_state(Obj("a"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert not started[0].answered.is_set()
        assert tracking[0]._reuse_of
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert started[0].answered.is_set()
        assert not tracking[0]._reuse_of

    async def run() -> None:
        tracking.append(RequestTracking(app, lambda: manager, started.append))
        client = Client()
        await tracking[0](scope(), client.messages.get, client.send)

    manager = Manager()
    asyncio.run(run())


@pytest.mark.parametrize("rid", ["1", "", ["1", "12"]], ids=repr)
def test_a_client_that_leaves_aborts_its_own_requests_whatever_it_calls_them(rid: Any) -> None:
    """SGLang's scheduler aborts every request whose id begins with the one it is told."""
    manager, client = Manager(), Client()
    text = ["a", "b"] if isinstance(rid, list) else "a"

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        answer = manager.generate_request(GenerateReqInput(rid=rid, text=text))
        await anext(answer)
        client.leave()
        await receive()
        await answer.aclose()

    async def run() -> None:
        await RequestTracking(app, lambda: manager)(scope(), client.messages.get, client.send)

    asyncio.run(asyncio.wait_for(run(), 5))
    assert manager.aborted == list(manager.rid_to_state)
    assert len(manager.aborted) == (len(rid) if isinstance(rid, list) else 1)
    assert all(len(made) == 32 for made in manager.aborted)  # a UUID: nobody else's begins with it


def test_embeddings_too_get_ids_that_no_client_chose() -> None:
    manager = Manager()

    async def app(scope_: Any, receive: Any, send: Any) -> None:
        asked = EmbeddingReqInput(rid="1", text="a")
        async for _ in manager.generate_request(asked, SimpleNamespace(scope=scope_)):
            pass

    async def run() -> None:
        client = Client()
        await RequestTracking(app, lambda: manager)(scope("/v1/embeddings"), client.messages.get, client.send)

    asyncio.run(run())
    assert [len(rid) for rid in manager.rid_to_state] == [32]


def test_what_names_pages_is_not_the_clients_to_say() -> None:
    """Image X under the page keys of image Y would be found by all who send Y."""
    manager = Manager()
    asked = GenerateReqInput(
        text="a", image_data="x", mm_hashes=["00"], lora_id="b", positional_embed_overrides={}, lora_path="p"
    )

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        async for _ in manager.generate_request(asked):
            pass

    async def run() -> None:
        client = Client()
        await RequestTracking(app, lambda: manager)(scope(), client.messages.get, client.send)

    asyncio.run(run())
    assert (asked.mm_hashes, asked.lora_id, asked.positional_embed_overrides) == (None, None, None)
    assert (asked.image_data, asked.lora_path) == ("x", "p")


def test_ids_that_are_not_a_clients_are_kept() -> None:
    """`/pd/pull` and SGLang's own health check are known by theirs."""
    manager = Manager()

    async def app(scope_: Any, receive: Any, send: Any) -> None:
        own = [GenerateReqInput(rid="pull", text="a"), GenerateReqInput(rid="HEALTH_CHECK_1", text="a")]
        for asked, request in zip(own, (None, SimpleNamespace(scope=scope_)), strict=True):
            async for _ in manager.generate_request(asked, request):
                pass

    async def run() -> None:
        client = Client()
        tracking = RequestTracking(app, lambda: manager)
        tracking._watch(manager)
        await tracking(scope("/health_generate"), client.messages.get, client.send)

    asyncio.run(run())
    assert list(manager.rid_to_state) == ["pull", "HEALTH_CHECK_1"]
