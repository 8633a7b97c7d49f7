"""What the wrap of SGLang's tokenizer manager records, replaces and counts, around a manager in small."""

from __future__ import annotations

import asyncio
import contextvars
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.engine.http.request_context import Bootstrap, set_bootstrap
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.sglang.children.first_tokens import FIRST
from pdserve.engine.sglang.first_tokens import digest_of
from pdserve.engine.sglang.tokenizer_manager import TrackedRequests
from tests.support.engine.manager import Client, Manager, Scripted, State, Tokenized, scope_of, serve, served

META = {
    "queue_time": 0.5,
    "storage_prefetch_wait": 0.2,
    "forward_entry_time": 1000.0,
    "prefill_finished_time": 1000.25,
}


def test_pages_are_named_as_the_scheduler_names_them_before_sglang_encodes_the_tokens() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        manager._init_req_state(Tokenized(["plain", "lora", "both", "salt", "image", "padded"]))
        await manager._send_batch_request(
            [
                Tokenized("plain", [1, 2], "key", "salt"),
                Tokenized("lora", [1], lora_id="L"),
                Tokenized("both", [1], extra_key="K", lora_id="L"),
                Tokenized("salt", [1], cache_salt=""),
                Tokenized("image", [1], mm_inputs=SimpleNamespace(padded_input_ids=None)),
                Tokenized("padded", [1, 2], mm_inputs=SimpleNamespace(padded_input_ids=[1, 2**50])),
            ]
        )

    manager, request, _ = served(app)
    assert request.request_id == "id-1"
    assert request.answered.is_set()
    assert manager.aborted == []
    named = {rid: (m.input_ids, m.extra_key, m.cache_salt) for rid, m in request.requests.items()}
    assert named == {
        "plain": ([1, 2], "key", "salt"),
        "lora": ([1], "L", None),
        "both": ([1], "KL", None),
        "salt": ([1], None, None),
        "image": (None, None, None),
        "padded": ([1, 2**50], None, None),
    }


async def test_requests_of_two_connections_do_not_mix() -> None:
    manager, records = Manager(), []
    both = asyncio.Barrier(2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        rid = scope["headers"][0][1].decode()
        await both.wait()
        manager._init_req_state(Tokenized(rid))
        await both.wait()
        await manager._send_one_request(Tokenized(rid, [len(rid)]))

    scopes = [scope_of("/generate", (b"x-request-id", name)) for name in (b"x", b"yy")]
    await asyncio.gather(*(serve(app, scope, Client(), records.append) for scope in scopes))
    assert {r.request_id: {rid: m.input_ids for rid, m in r.requests.items()} for r in records} == {
        "x": {"x": [1]},
        "yy": {"yy": [2]},
    }


def test_what_was_found_cached_is_told_in_the_head_and_to_sglangs_own_metrics() -> None:
    """SGLang sends a stream's head before it knows anything: it waits for the first piece of the body."""

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        manager._init_req_state(Tokenized("a"))
        await manager._send_one_request(Tokenized("a", [1]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        assert client.sent == []
        output = SimpleNamespace(
            rids=["a"],
            prompt_tokens=[65],
            cached_tokens=[64],
            cached_tokens_details=[{"device": 0, "host": 0, "storage": 64}],
        )
        await manager._handle_batch_output(output)
        await send({"type": "http.response.body", "body": b"x"})

    manager, _, sent = served(app, scope=scope_of("/generate", (b"x-pdserve-prefilled", b"3/0/0")))
    assert manager.told == [64], "SGLang's own metrics count what this worker found"
    cached = (b"x-pdserve-cached", b"device=0, host=0, pool=64, computed=1")
    assert sent[0]["headers"] == [(b"a", b"b"), cached]
    assert sent[1]["body"] == b"x"


def asking(asked: Any, leaves: bool = False) -> Any:
    """An app that asks the engine for this."""

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await receive()
        answer: Any = manager.generate_request(asked)
        await anext(answer)
        if leaves:
            client.leave()
            await receive()
        await answer.aclose()

    return app


@pytest.mark.parametrize("rid", ["1", "", ["1", "12"]], ids=repr)
def test_a_client_that_leaves_aborts_its_own_requests_whatever_it_calls_them(rid: Any) -> None:
    """SGLang's scheduler aborts every request whose id begins with the one it is told."""
    text = ["a", "b"] if isinstance(rid, list) else "a"
    manager, _, _ = served(asking(GenerateReqInput(rid=rid, text=text), leaves=True))
    assert manager.aborted == list(manager.rid_to_state)
    assert len(manager.aborted) == (len(rid) if isinstance(rid, list) else 1)
    assert all(len(made) == 32 for made in manager.aborted)  # a UUID: nobody else's begins with it


def test_what_names_pages_is_not_the_clients_to_say() -> None:
    """Image X under the page keys of image Y would be found by all who send Y."""
    asked = GenerateReqInput(
        text="a", image_data="x", mm_hashes=["00"], lora_id="b", positional_embed_overrides={}, lora_path="p"
    )
    served(asking(asked))
    assert (asked.mm_hashes, asked.lora_id, asked.positional_embed_overrides) == (None, None, None)
    assert (asked.image_data, asked.lora_path) == ("x", "p")


def test_where_a_worker_connects_is_not_the_clients_to_say() -> None:
    theirs = {"bootstrap_host": "198.51.100.7", "bootstrap_port": 1, "bootstrap_room": 5}
    asked = [GenerateReqInput(text="a", **theirs) for _ in range(2)]
    served(asking(asked[0]))
    contextvars.copy_context().run(
        lambda: (set_bootstrap(Bootstrap("10.0.0.5", 8998, 7)), served(asking(asked[1])))
    )
    rooms = [(one.bootstrap_host, one.bootstrap_port, one.bootstrap_room) for one in asked]
    assert rooms == [(None, None, None), ("10.0.0.5", 8998, 7)]


async def test_embeddings_too_get_ids_that_no_client_chose_and_ids_that_are_not_a_clients_are_kept() -> None:
    """`/pd/pull` and SGLang's own health check are known by theirs."""
    manager = Manager()
    for asked, path in (
        (EmbeddingReqInput(rid="1", text="a"), "/v1/embeddings"),
        (GenerateReqInput(rid="pull", text="a"), None),
        (GenerateReqInput(rid="HEALTH_CHECK_1", text="a"), "/health_generate"),
    ):
        request = None if path is None else SimpleNamespace(scope=scope_of(path))
        async for _ in manager.generate_request(asked, request):
            pass
    embedded, *kept = manager.rid_to_state
    assert (len(embedded), kept) == (32, ["pull", "HEALTH_CHECK_1"])


def created(ids: list[int] | None = None, mm_inputs: Any = None, **fields: Any) -> Any:
    """The request as the scheduler would get it."""
    asked = GenerateReqInput(input_ids=[5, 6], **fields)
    asked.normalize_batch_and_arguments()
    manager = Manager()
    return manager._create_tokenized_object(asked, ids or [5, 6], mm_inputs)


PROMPTS = {"return_logprob": True, "logprob_start_len": 0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ids": [5, 4096]}, "vocabulary"),
        ({"return_logprob": True, "top_logprobs_num": 5000}, "log-probabilities"),
        ({"return_logprob": True, "token_ids_logprob": [1] * 5000}, "log-probabilities"),
        (PROMPTS | {"top_logprobs_num": 100, "ids": [1] * 100_000}, "log-probabilities"),
        ({"sampling_params": {"stop_regex": "(a|a)*b"}}, "stop_regex"),
    ],
)
def test_what_would_end_the_scheduler_is_refused_before_it(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        created(**fields)


def test_sampling_without_effect_reaches_the_scheduler_as_what_it_can_compute() -> None:
    wanted = {"top_k": 2**40, "stop_token_ids": [-1, 0, 3, 4096, 10**30], "min_new_tokens": 2**40}
    sampling = created(sampling_params=wanted).sampling_params
    assert (sampling.top_k, sampling.stop_token_ids, sampling.min_new_tokens) == (1 << 30, {0, 3}, 1 << 30)


def test_sglangs_own_tokens_of_media_may_be_beyond_the_vocabulary_and_the_clients_may_not() -> None:
    created(ids=[5, 10**6], mm_inputs=object())
    manager = Manager()
    asked = GenerateReqInput(input_ids=[5, 10**6])
    asked.normalize_batch_and_arguments()
    with pytest.raises(ValueError, match="vocabulary"):
        manager._create_tokenized_object(asked, [5], object())


class ScriptedFirstToken(Scripted):
    """An answer whose first token is sent before it is computed, and then the rest."""

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.rid = "a"
        self._init_req_state(obj)
        self.sampling = SamplingParams(max_new_tokens=8)
        self.sampling.normalize(None)
        await self._send_one_request(Tokenized("a", array("q", [1, 2]), sampling_params=self.sampling))
        for tokens, cached, finish in ((1, 0, None), (2, 64, None), (3, 64, {"type": "length"})):
            await self._handle_batch_output(
                SimpleNamespace(
                    rids=["a"],
                    prompt_tokens=[65],
                    cached_tokens=[cached],
                    cached_tokens_details=[{"storage": cached}],
                    completion_tokens=[tokens],
                    finished_reasons=[finish],
                )
            )
            meta = {**META, "queue_time": 0.2 + tokens} if tokens > 1 else {}
            meta |= {"id": "a", "completion_tokens": tokens, "finish_reason": finish}
            yield {"text": "a" * tokens, "meta_info": meta}


class FirstToken(TrackedRequests, ScriptedFirstToken):
    pass


def test_what_is_sent_before_anything_was_computed_says_nothing_of_caches_and_times() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        contents: Any = manager.generate_request(SimpleNamespace(rid=None))
        await anext(contents)
        record = current_request()
        assert record is not None
        assert (record.first, record.reuse.headers()) == (None, [])
        assert [content["text"] async for content in contents] == ["aa", "aaa"]

    asked = Tokenized("a", array("q", [1, 2]), sampling_params=SamplingParams(max_new_tokens=8))
    asked.sampling_params.normalize(None)
    handed = f"7x{digest_of(asked, 'ns')}".encode()
    manager, metrics = FirstToken(), WorkerMetrics()
    scope = scope_of("/generate", (b"x-pdserve-first", handed))
    _, request, _ = served(app, manager, scope, metrics=metrics, namespace="ns")
    assert manager.sampling.custom_params == {FIRST: 7}
    assert request.first is not None
    assert request.first.parts_s == {"queue": 2.0, "pull": 0.2, "compute": 0.25}
    assert request.reuse.headers() == [(b"x-pdserve-cached", b"device=0, host=0, pool=64, computed=1")]


def test_a_worker_without_a_pool_takes_no_first_token() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        assert [content["text"] async for content in manager.generate_request(SimpleNamespace(rid=None))]

    asked = Tokenized("a", array("q", [1, 2]), sampling_params=SamplingParams(max_new_tokens=8))
    asked.sampling_params.normalize(None)
    manager, handed = FirstToken(), f"7x{digest_of(asked, '')}".encode()
    served(app, manager, scope_of("/generate", (b"x-pdserve-first", handed)))
    assert manager.sampling.custom_params is None


def test_the_clients_own_word_for_a_first_token_is_taken_out() -> None:
    manager = Manager()
    asked = GenerateReqInput(input_ids=[5], sampling_params={"custom_params": {FIRST: 10**9, "mine": 1}})
    asked.normalize_batch_and_arguments()
    made = manager._create_tokenized_object(asked, [5])
    assert made.sampling_params.custom_params == {"mine": 1}


class ScriptedTwoPrompts(Scripted):
    """Every request is answered in two steps, for two prompts of 100 tokens, of which 64 were cached."""

    closed = 0

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.rid, obj.batch_size = ["a", "b"], 2
        self._init_req_state(obj)
        for rid in obj.rid:
            await self._send_one_request(Tokenized(rid))
        details = [{"device": 64, "host": 0}] * 2
        await self._handle_batch_output(
            SimpleNamespace(
                rids=obj.rid, prompt_tokens=[100, 100], cached_tokens=[64, 64], cached_tokens_details=details
            )
        )
        meta = {**META, "id": "a", "cached_tokens": 64, "cached_tokens_details": details[0]}
        try:
            yield {"text": "a", "meta_info": dict(meta)}
            yield {"text": "ab", "meta_info": {**meta, "queue_time": 9.0}}
        finally:
            self.closed += 1


class TwoPrompts(TrackedRequests, ScriptedTwoPrompts):
    pass


class ScriptedTwoChoices(ScriptedTwoPrompts):
    """A stream of two choices: SGLang makes each a request of its own."""

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.rid = ["a", "b"]
        self._init_req_state(obj)
        for index, rid in enumerate(obj.rid * 2):
            yield {"text": rid, "index": index % 2, "meta_info": {**META, "id": rid}}


class TwoChoices(TrackedRequests, ScriptedTwoChoices):
    pass


@pytest.mark.parametrize(
    ("path", "ids"), [("/v1/chat/completions", ["a"] * 4), ("/generate", ["a", "b"] * 2)]
)
def test_all_choices_of_a_stream_have_one_id_but_in_sglangs_own_api(path: str, ids: list[str]) -> None:
    contents: list[Any] = []

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        asked = SimpleNamespace(rid=None, stream=True, return_prompt_token_ids=False)
        contents.extend([content async for content in manager.generate_request(asked)])

    served(app, TwoChoices(), scope_of(path))
    assert [content["meta_info"]["id"] for content in contents] == ids
    assert [content["text"] for content in contents] == ["a", "b"] * 2


@pytest.mark.parametrize("steps", [1, 2])
def test_the_head_says_what_the_first_step_said_and_a_reader_that_leaves_ends_the_engines_request(
    steps: int,
) -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        contents: Any = manager.generate_request(SimpleNamespace(rid=None))
        for _ in range(steps):
            content = await anext(contents)
            await send({"type": "http.response.body", "body": content["text"].encode(), "more_body": True})
        await contents.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    metrics, manager = WorkerMetrics(), TwoPrompts()
    _, request, sent = served(app, manager, metrics=metrics)
    assert manager.closed == 1
    assert isinstance(request, HttpRequest)
    assert sent[0]["headers"] == [
        (b"a", b"b"),
        (b"x-pdserve-cached", b"device=128, host=0, pool=0, computed=72"),
        (b"server-timing", b"queue;dur=300.0, pull;dur=200.0, compute;dur=250.0"),
    ]
    assert [message.get("body") for message in sent[1:]] == [*[b"a", b"ab"][:steps], b""]
    [family] = metrics._tokens.collect()
    tokens = {s.labels["tier"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert tokens == {"device": 128, "host": 0, "pool": 0, "computed": 72}


def test_every_step_of_an_answer_has_the_count_that_the_prefill_worker_found() -> None:
    contents: list[Any] = []

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        contents.extend([content async for content in manager.generate_request(SimpleNamespace(rid=None))])

    served(app, TwoPrompts(), scope_of("/generate", (b"x-pdserve-prefilled", b"3/2/1, 0/0/0")))
    metas = [content["meta_info"] for content in contents]
    assert [(meta["cached_tokens"], meta["cached_tokens_details"]) for meta in metas] == [
        (6, {"device": 3, "host": 2, "storage": 1})
    ] * 2


def test_a_conversation_lacks_the_last_token_which_was_never_fed_back() -> None:
    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        manager._init_req_state(Tokenized(["a", "b"]))
        await manager._send_one_request(Tokenized("a", [1, 2]))
        manager.rid_to_state["a"] = State()  # SGLang forgets; the record has its own hold on the state

    _, request, _ = served(app)
    request.requests["a"].state.output_ids = [3, 4]  # type: ignore[attr-defined]
    assert request.requests["a"].conversation() == [1, 2, 3]
    assert request.requests["b"].conversation() == []


def test_a_conversation_stays_at_its_data_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = Tokenized("first", [1, 2, 3, 4, 5]), Tokenized("other", [6, 7, 8, 9, 5])
    second = Tokenized("second", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    chosen = Tokenized("chosen", [1, 2, 3, 4], routed_dp_rank=1)
    direct = Tokenized("direct", [1, 2, 3, 4], bootstrap_room=7)

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        manager._init_req_state(Tokenized(["first", "other", "second", "chosen", "direct"]))
        await manager._send_batch_request([first, other, second, chosen, direct])

    monkeypatch.setattr(Manager, "elastic_worker_count", 2)
    served(app)
    ranks = [one.routed_dp_rank for one in (first, other, second, chosen, direct)]
    assert ranks == [0, 1, 0, 1, None]
