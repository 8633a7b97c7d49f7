"""The one wrap of SGLang's TokenizerManager: what its requests are, what they found, and their end.

Six methods are wrapped, each once:

    generate_request     it waits while weights are replaced; what a client may not set is taken out; earlier
                         answers get their tokens (`exact_turns.py`); aborts, the first token and finished
                         answers are noted; counts of cached tokens are replaced; a stream is marked
                         (`continuation.py`)
    _init_req_state      a request state (`ReqState`) was made for an SGLang request id
    _create_tokenized_object  it is as the scheduler gets it: what would end the scheduler is refused
    _send_*_request      its prompt's token ids, extra key and salt are final, and it goes to the scheduler
    _handle_batch_output what it found cached; not in the context of one request, but for all that run

SGLang notices a client that left after up to 4 s (0.5.23: a poll of that period when not streaming, a sleep
of 2 s when streaming); the record of the HTTP request (`http/request.py`) aborts at once. A server that stops
aborts what runs (`server.py`), which SGLang would answer as something complete. Such an answer is broken off
(`http/connection.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from fastapi import HTTPException

from pdserve.engine.engine_bounds import (
    bound_sampling,
    check_ids,
    check_logprobs,
    check_stop_regex,
    check_texts,
)
from pdserve.engine.http.cache_report import Reuse
from pdserve.engine.http.cache_salt import salt_of_request
from pdserve.engine.http.dp_ranks import DpRanks
from pdserve.engine.http.endpoints import COMPLETIONS, EMBEDDINGS, GENERATE, PREFILL, RESPONSES
from pdserve.engine.http.held import Door
from pdserve.engine.http.meeting_room import room_of_request
from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import HASHED_AT_ONCE_TOKENS
from pdserve.engine.sglang.answers import first_token, is_aborted, note_counts, tell_counts, under_one_id
from pdserve.engine.sglang.children.embedding_salts import salted
from pdserve.engine.sglang.continuation import Continuation, extend_prompt, marked
from pdserve.engine.sglang.prompts.exact_turns import SglangTurns
from pdserve.engine.sglang.text_offsets import locate
from pdserve.engine.turns.exact import Turn
from pdserve.errors import RequestError
from pdserve.pages import namespace_seed, page_hashes
from pdserve.sglang_places import places

_SET_BY_SGLANG = (
    *("rid", "lora_id", "mm_hashes", "positional_embed_overrides"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
)

PLACES: Final = (
    *places(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.generate_request(obj, request)",
        "TokenizerManager._init_req_state(obj, request) uses rid_to_state",
        "TokenizerManager._create_tokenized_object(obj) uses sampling_params, verify",
        "TokenizerManager._tokenize_one_request uses _create_tokenized_object",
        "TokenizerManager._batch_tokenize_and_process uses _create_tokenized_object",
        "TokenizerManager._send_one_request(tokenized_obj)",
        "TokenizerManager._send_batch_request(tokenized_objs)",
        "TokenizerManager._handle_batch_output(recv_obj)",
        "TokenizerManager.abort_request(rid)",
        "TokenizerManager.init_running_status sets rid_to_state",
        "TokenizerManager.__init__ sets elastic_worker_count",
        "TokenizerManager.init_tokenizer_and_processor sets mm_processor",
        "TokenizerManager._tokenize_one_request uses SGLANG_MM_PRECOMPUTE_HASH, set_pad_values",
        "ReqState(finished, output_ids, obj, dispatched, abort_sent)",
    ),
    *places(
        "sglang.srt.managers.io_struct",
        f"GenerateReqInput({', '.join(_SET_BY_SGLANG)}, cache_salt)",
        "TokenizedGenerateReqInput(rid, input_ids, mm_inputs, extra_key, lora_id, cache_salt)",
        "TokenizedGenerateReqInput(sampling_params, return_logprob, logprob_start_len, top_logprobs_num)",
        "TokenizedGenerateReqInput(token_ids_logprob, routed_dp_rank, bootstrap_room)",
    ),
    *places(
        "sglang.srt.sampling.sampling_params",
        "SamplingParams(top_k, min_new_tokens, max_new_tokens, stop_token_ids, stop_regex)",
        "SamplingParams(stop_regex_strs, stop_regex_max_len)",
    ),
    *places("sglang.srt.managers.mm_utils", "pad_mm_tokens(input_ids, mm_inputs)"),
    *places(
        "sglang.srt.managers.schedule_batch",
        "MultimodalProcessorOutput(mm_items, padded_input_ids, im_token_id, im_start_id, im_end_id)",
        "MultimodalProcessorOutput(audio_token_id, audio_start_id, audio_end_id, video_token_id)",
        "MultimodalDataItem(pad_value, modality, offsets, hash)",
        "MultimodalDataItem.set_hash(hash_value)",
    ),
    *places(
        "sglang.srt.managers.scheduler",
        "Scheduler._try_apply_padded_mm_input_ids(recv_req, req, image_inputs) uses padded_input_ids",
        "Scheduler._handle_generate_request uses _try_apply_padded_mm_input_ids, pad_input_ids_func",
    ),
)


@dataclass
class SglangRequest:
    """One request as SGLang's scheduler sees it. `state` is its ReqState, which outlives its registration."""

    rid: str
    state: Any
    input_ids: Sequence[int] | None = None  # None until it was tokenised
    extra_key: str | None = None
    cache_salt: str | None = None
    continuation: Continuation | None = None  # where it continues another worker's stream
    dp_rank: int | None = None  # where it was decided here
    reuse: Reuse | None = None
    tell_abort: Callable[[str], None] | None = None

    @property
    def was_sent(self) -> bool:
        return bool(self.state.dispatched)

    @property
    def is_finished(self) -> bool:
        return bool(self.state.finished)

    def conversation(self) -> list[int]:
        """Prompt and output, but the last output token: it was sampled and never fed back."""
        if self.input_ids is None:
            return []
        output = list(self.state.output_ids)
        return [*self.input_ids, *output[:-1]]

    def abort(self) -> None:
        assert self.tell_abort is not None
        self.tell_abort(self.rid)


def watch(
    manager: Any,
    *,
    metrics: WorkerMetrics | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
    door: Door | None = None,
    turns: SglangTurns | None = None,
) -> None:
    """Wrap the methods of SGLang's `manager`; once. `is_stopping`: this server's end aborts what runs.
    `door`: what all requests pass first. `turns`: gives prompts the tokens that they had before.
    """
    wrap = _Wrap(manager, metrics, is_stopping, door or Door(), turns)
    manager.generate_request = wrap.generate_request
    manager._init_req_state = wrap.init_req_state
    manager._create_tokenized_object = wrap.create_tokenized
    manager._send_one_request = wrap.sending(manager._send_one_request, lambda one: [one])
    manager._send_batch_request = wrap.sending(manager._send_batch_request, list)
    manager._handle_batch_output = wrap.handle_batch_output


class _Wrap:
    def __init__(
        self,
        manager: Any,
        metrics: WorkerMetrics | None,
        is_stopping: Callable[[], bool],
        door: Door,
        turns: SglangTurns | None,
    ) -> None:
        self._manager = manager
        self._metrics = metrics
        self._is_stopping = is_stopping
        self._door = door
        self._turns = turns
        self._generate = manager.generate_request
        self._init = manager._init_req_state
        self._handle = manager._handle_batch_output
        self._create = manager._create_tokenized_object
        self._media_is_named = names_media(manager)
        ranks = int(manager.elastic_worker_count)
        self._dp_ranks = DpRanks(ranks) if ranks > 1 else None
        self._made: WeakValueDictionary[str, SglangRequest] = WeakValueDictionary()
        """By SGLang's request id, as long as the HTTP request's record holds them."""

    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        http = current_request()
        contents = self._noted(obj, request, http)
        if http is None or not getattr(obj, "stream", False):
            return contents
        if http.stream is not None:
            wanted = obj.return_prompt_token_ids or self._manager.incremental_streaming_output
            contents = marked(
                contents,
                http.stream,
                self._continuation_of,
                token_ids_are_wanted=wanted,
                choices=lambda: getattr(obj, "parallel_sample_num", 1) or 1,
            )
        return contents if http.path == GENERATE else under_one_id(contents)

    def _reuse_of(self, rid: str) -> Reuse | None:
        made = self._made.get(rid)
        return None if made is None else made.reuse

    def _continuation_of(self, rid: str) -> Continuation | None:
        made = self._made.get(rid)
        return None if made is None else made.continuation

    async def _noted(self, obj: Any, request: Any, http: HttpRequest | None) -> AsyncGenerator[Any, None]:
        if http is not None or (request is not None and request.scope["path"] == EMBEDDINGS):
            kept = ("rid",) if http is not None and http.path == RESPONSES else ()
            _disown(obj, kept)
        if (salt := salt_of_request()) is not None and hasattr(obj, "cache_salt"):
            obj.cache_salt = salt
        if (room := room_of_request()) is not None and hasattr(obj, "bootstrap_room"):
            obj.bootstrap_host, obj.bootstrap_port, obj.bootstrap_room = room
        try:
            await self._door.passed()
        except RequestError as error:
            raise HTTPException(error.status, str(error)) from error
        turn = None if self._turns is None else await self._turns.begin(obj, http)
        has_offsets = http is not None and http.path == COMPLETIONS and obj.return_logprob
        is_echoed = has_offsets and obj.logprob_start_len == 0
        try:
            async with contextlib.aclosing(self._generate(obj, request)) as contents:
                async for content in contents:
                    answers = content if isinstance(content, list) else [content]
                    self._note(http, answers)
                    for answer in answers if has_offsets else ():
                        locate(answer["meta_info"], self._manager.tokenizer, is_echoed=is_echoed)
                    if turn is not None and http is not None and http.path != PREFILL:
                        await self._record(turn, http, answers)
                    yield content
        except (ValueError, HTTPException):  # what was aborted with a status is raised where nothing streams
            if http is not None and self._is_stopping():
                http.stop()
            raise

    def _note(self, http: HttpRequest | None, answers: Sequence[dict[str, Any]]) -> None:
        if http is None:
            return
        if self._is_stopping() and any(map(is_aborted, answers)):
            http.stop()
        tell_counts(answers, http.reuse)
        if http.first is None:
            http.first = first_token(answers)
            if self._metrics is not None:
                self._metrics.count(http.first, http.reuse.by_tier())

    async def _record(self, turn: Turn, http: HttpRequest, answers: Sequence[dict[str, Any]]) -> None:
        """The answers that are finished with these."""
        for answer in answers:
            meta = answer.get("meta_info") or {}
            made = self._made.get(meta.get("id", ""))
            if self._turns is None or made is None or made.input_ids is None or is_aborted(answer):
                continue
            if meta.get("finish_reason"):
                await self._turns.end(turn, http, made.input_ids, list(made.state.output_ids))

    def init_req_state(self, obj: Any, request: Any = None) -> Any:
        result = self._init(obj, request)
        http = current_request()
        if http is not None:
            if not http.requests:
                http.reuse.begin(getattr(obj, "batch_size", 1), getattr(obj, "parallel_sample_num", 1))
            for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
                made = SglangRequest(
                    rid, self._manager.rid_to_state[rid], reuse=http.reuse, tell_abort=self._abort
                )
                http.requests[rid] = self._made[rid] = made
        return result

    def create_tokenized(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError for what would end the scheduler."""
        sampling = obj.sampling_params
        check_stop_regex(sampling.get("stop_regex") if isinstance(sampling, dict) else None)
        tokenized = self._create(obj, *args, **kwargs)
        _bound(obj, tokenized, self._manager.model_config.vocab_size)
        if not hasattr(tokenized, "cache_salt"):  # to be embedded
            tokenized.lora_name = salted(tokenized.lora_name, salt_of_request())
        return tokenized

    def _abort(self, rid: str) -> None:
        self._manager.abort_request(rid=rid)

    async def handle_batch_output(self, output: Any) -> None:
        note_counts(output, self._reuse_of)
        await self._handle(output)

    def sending(
        self, send: Callable[[Any], Any], tokenized: Callable[[Any], list[Any]]
    ) -> Callable[[Any], Any]:
        """For a method that sends requests to the scheduler. `tokenized`: the requests in its argument."""

        async def send_request(argument: Any) -> Any:
            http = current_request()
            if http is None:
                return await send(argument)
            pairs = [(made, one) for one in tokenized(argument) if (made := self._made.get(one.rid))]
            for made, one in pairs:
                self._extend(http, made, one)
                _name(made, one, token_ids(one, media_is_named=self._media_is_named))
                if self._dp_ranks is not None:
                    await self._place(self._dp_ranks, made, one)
                http.reuse.sent(one.rid)
            result = await send(argument)
            if http.left.is_set():
                http.is_cut_short = True
                for made, _ in pairs:
                    made.abort()
            return result

        return send_request

    async def _place(self, ranks: DpRanks, made: SglangRequest, tokenized: Any) -> None:
        """Choose the data parallel rank of a request, unless a client or a direct hand-off has chosen it."""
        asked = (tokenized.routed_dp_rank, tokenized.bootstrap_room)
        if made.input_ids is None or asked != (None, None):
            return
        seed = namespace_seed(made.extra_key, made.cache_salt)
        hashed = partial(page_hashes, made.input_ids, self._manager.server_args.page_size, seed)
        is_long = len(made.input_ids) > HASHED_AT_ONCE_TOKENS
        chain = await asyncio.to_thread(hashed) if is_long else hashed()
        running = [0] * ranks.count
        for one in self._made.values():
            if one.dp_rank is not None and not one.is_finished:
                running[one.dp_rank] += 1
        made.dp_rank = tokenized.routed_dp_rank = ranks.choose(chain, running)

    def _extend(self, http: HttpRequest, made: SglangRequest, tokenized: Any) -> None:
        if http.stream is None or http.stream.so_far is None:
            return
        try:
            made.continuation = extend_prompt(tokenized, http.stream.so_far, self._manager)
        except ValueError as error:
            http.stream.refuse(RequestError(400, str(error)))
            raise


def _disown(obj: Any, kept: Sequence[str] = ()) -> None:
    """Take out of a client's request what SGLang sets itself. The scheduler aborts every request whose id
    *begins* with the one that it is told, so no client may choose ids: its own name for a request is
    `x-request-id`. The other fields change what a page's key stands for (pages under another's name), have
    the worker connect to an address, or end the scheduler when they are no tensors.

    `kept`: the id of a stored response, by which SGLang cancels it, and which the router has chosen.
    """
    for name in _SET_BY_SGLANG:
        if hasattr(obj, name) and name not in kept:
            setattr(obj, name, None)


def _bound(obj: Any, tokenized: Any, vocabulary: int) -> None:
    """Raises ValueError for what would end the scheduler."""
    check_texts(tokenized)
    # the tokens of media are SGLang's own, and may have ids beyond the vocabulary
    ids = tokenized.input_ids if tokenized.mm_inputs is None else obj.input_ids
    check_ids(() if ids is None else ids, vocabulary)
    if (sampling := tokenized.sampling_params) is not None:
        bound_sampling(sampling, vocabulary)
    if not getattr(tokenized, "return_logprob", False):
        return
    start = tokenized.logprob_start_len
    prompt = 0 if start < 0 else max(0, len(tokenized.input_ids or ()) - start)
    each = max(tokenized.top_logprobs_num, len(tokenized.token_ids_logprob or ()))
    check_logprobs(prompt, sampling.max_new_tokens or 0, each, vocabulary)


def _name(made: SglangRequest, tokenized: Any, ids: list[int] | None) -> None:
    """Record what names the request's pages, as the scheduler will see it (`Req.__init__`). Copied: the
    tokenizer manager turns these fields into bytes next. `ids`: of its tokens, None where only the scheduler
    knows them.
    """
    if ids is None:
        return
    made.input_ids = ids
    made.extra_key = tokenized.extra_key
    if tokenized.lora_id is not None:
        made.extra_key = (tokenized.extra_key or "") + tokenized.lora_id
    made.cache_salt = tokenized.cache_salt or None


def token_ids(tokenized: Any, *, media_is_named: bool) -> list[int] | None:
    """The ids that SGLang names the pages of a prompt by. `tokenized`: SGLang's request, as it is sent to the
    scheduler. None: only the scheduler knows them.

    SGLang replaces the ids of an image's tokens by ids made of a hash of its pixels. The hash is made in this
    process, where SGLANG_MM_PRECOMPUTE_HASH is set.
    """
    ids, media = tokenized.input_ids, tokenized.mm_inputs
    if ids is None or media is None:
        return None if ids is None else list(ids)
    padded = media.padded_input_ids
    if padded is not None and len(padded) == len(ids):  # as `_try_apply_padded_mm_input_ids`
        return list(padded)
    if not media_is_named or any(item.pad_value is None for item in media.mm_items):
        return None
    from sglang.srt.managers.mm_utils import pad_mm_tokens

    return list(pad_mm_tokens(array("q", ids), media))


def names_media(tokenizer_manager: Any) -> bool:
    """Whether the model replaces the ids of media as most models do (`pad_mm_tokens`), seen by trying it on a
    small prompt. Others need the model itself for it, which this process has not.
    """
    processor = tokenizer_manager.mm_processor
    if processor is None:
        return False
    wanted = (tokenizer_manager.model_config.hf_config.architectures or [""])[0]
    model = next((one for one in processor.models if one.__name__ == wanted), None)
    pad = getattr(model, "pad_input_ids", None)
    return pad is not None and _pads_as_usual(pad)


def _pads_as_usual(pad: Callable[[Any, Any, Any], Any]) -> bool:
    from sglang.srt.managers.mm_utils import pad_mm_tokens

    ids, media = _sample_with_media()
    usual = list(pad_mm_tokens(ids, media))
    try:
        return list(pad(object(), ids, media)) == usual
    # boundary: the model's own code, which is without its model here
    except Exception:
        return False


def _sample_with_media() -> tuple[array[int], Any]:
    """A prompt with two images, a sound and a film between words, as SGLang's processors give it."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    ids, items = array("q", [1]), []
    tokens = {Modality.IMAGE: 101, Modality.AUDIO: 102, Modality.VIDEO: 103}
    for number, modality in enumerate((Modality.IMAGE, Modality.IMAGE, Modality.AUDIO, Modality.VIDEO), 1):
        start = len(ids) + 2
        ids.extend([110, 2, *[tokens[modality]] * 3, 111, 3])
        item = MultimodalDataItem(modality=modality, offsets=[(start, start + 2)], hash=number)
        item.set_hash(number)
        items.append(item)
    media = MultimodalProcessorOutput(
        mm_items=items,
        im_token_id=101,
        im_start_id=110,
        im_end_id=111,
        audio_token_id=102,
        audio_start_id=110,
        audio_end_id=111,
        video_token_id=103,
    )
    return ids, media
