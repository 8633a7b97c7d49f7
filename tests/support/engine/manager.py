"""SGLang's tokenizer manager in small, and one request through what a worker puts around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

from pdserve.engine.http.connection import AsgiApp
from pdserve.engine.http.request import HttpRequest, RequestTracking
from pdserve.engine.sglang.tokenizer_manager import TrackedRequests

TIMEOUT_S = 30.0


@dataclass
class State:
    """A ReqState."""

    dispatched: bool = False
    finished: bool = False
    output_ids: list[int] = field(default_factory=list)


@dataclass
class Tokenized:
    """A TokenizedGenerateReqInput."""

    rid: Any
    input_ids: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    mm_inputs: Any = None
    sampling_params: Any = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Any = None
    routed_dp_rank: int | None = None
    bootstrap_room: int | None = None
    require_reasoning: bool = False


class Scripted:
    """The part of SGLang's TokenizerManager that is overridden. A request's prompt is one token."""

    incremental_streaming_output = False
    tokenizer: Any = None
    mm_processor: Any = None
    elastic_worker_count = 1
    server_args = SimpleNamespace(page_size=4)
    model_config = SimpleNamespace(vocab_size=4096)

    def __init__(self) -> None:
        self.rid_to_state: dict[str, State] = {}
        self.aborted: list[str] = []
        self.told: list[int] = []
        """Cached tokens of the last batch of output."""

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
            self.rid_to_state[rid] = State()

    def _create_tokenized_object(self, obj: Any, ids: Any = None, mm_inputs: Any = None) -> Any:
        return Tokenized(
            obj.rid,
            ids,
            mm_inputs=mm_inputs,
            sampling_params=SamplingParams(**obj.sampling_params),
            return_logprob=obj.return_logprob,
            logprob_start_len=obj.logprob_start_len,
            top_logprobs_num=obj.top_logprobs_num,
            token_ids_logprob=obj.token_ids_logprob,
        )

    async def _send_one_request(self, tokenized: Any) -> None:
        self.rid_to_state[tokenized.rid].dispatched = True
        tokenized.input_ids = b"pickled"

    async def _send_batch_request(self, tokenized: list[Any]) -> None:
        for one in tokenized:
            await Scripted._send_one_request(self, one)

    async def _handle_batch_output(self, output: Any) -> None:
        self.told = output.cached_tokens

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj, request)
        for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
            await self._send_one_request(Tokenized(rid, [1]))
        yield {"text": "a", "meta_info": {}}

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


class Manager(TrackedRequests, Scripted):
    """As a worker has it."""

    def __init__(self) -> None:
        super().__init__()
        self.track()


class Client:
    """A connection: what the client sends, its leaving, and what it is sent."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Any] = []

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def scope_of(path: str = "/generate", *headers: tuple[bytes, bytes], query: bytes = b"") -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": [*headers], "query_string": query}


async def serve(
    app: AsgiApp,
    scope: dict[str, Any],
    client: Client,
    on_start: Callable[[HttpRequest], None] | None = None,
    **traced: Any,
) -> None:
    """One request through the tracking."""
    tracked = RequestTracking(app, on_start, **traced)
    await asyncio.wait_for(tracked(scope, client.messages.get, client.send), TIMEOUT_S)


def served(
    app: Callable[[Manager, Client, Any, Any], Any],
    manager: Manager | None = None,
    scope: dict[str, Any] | None = None,
    **watched: Any,
) -> tuple[Manager, HttpRequest, list[Any]]:
    """One request answered by `app(manager, client, receive, send)`: the manager that was watched, the
    record of the request, and what was sent.
    """
    manager = manager or Manager()
    manager.track(**watched)
    records: list[HttpRequest] = []

    async def run() -> list[Any]:
        client = Client()

        async def bound(_scope: Any, receive: Any, send: Any) -> None:
            await app(manager, client, receive, send)

        await serve(bound, scope or scope_of("/generate", (b"x-request-id", b"id-1")), client, records.append)
        return client.sent

    sent = asyncio.run(run())
    return manager, records[0], sent
