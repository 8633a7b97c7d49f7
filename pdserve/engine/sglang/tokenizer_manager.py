"""SGLang's TokenizerManager as a worker runs it: what its requests are, what they found, and their end.

    generate_request     what a client may not set is taken out; earlier answers get their tokens
                         (`exact_turns.py`); aborts, the first token and finished answers are noted; counts of
                         cached tokens are replaced; a stream is marked (`continuation.py`)
    _tokenize_texts      long texts are tokenized in a thread
    _init_req_state      a request state (`ReqState`) was made for an SGLang request id
    _create_tokenized_object  it is as the scheduler gets it: what would end the scheduler is refused
    _send_*_request      its prompt's token ids, extra key and salt are final, and it goes to the scheduler
    _handle_batch_output what it found cached; not in the context of one request, but for all that run

SGLang notices a client that left after up to 4 s (0.5.23: a poll of that period when not streaming, a sleep
of 2 s when streaming); the record of the HTTP request (`http/request.py`) aborts at once. A server that stops
aborts what runs (`server.py`), which SGLang would answer as something complete. Such an answer is broken off
(`http/connection.py`).

A request goes to the data parallel rank whose memory has the conversation so far (`DpRanks`). SGLang (0.5.23)
gives requests to the ranks of `--dp-size` and of data parallel attention by their load. Each rank has device
and host memory of its own. So a conversation's next turn would rarely meet its pages there, and would fetch
them from the pool."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

from fastapi import HTTPException

from pdserve.engine.contract.endpoints import COMPLETIONS, EMBEDDINGS, GENERATE, PREFILL, RESPONSES
from pdserve.engine.contract.sampling import (
    bound_sampling,
    check_ids,
    check_logprobs,
    check_texts,
)
from pdserve.engine.http.cache_report import Reuse
from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.engine.http.request_context import bootstrap_of_request, salt_of_request
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import HASHED_AT_ONCE_TOKENS
from pdserve.engine.sglang.answers import first_token, is_aborted, note_counts, tell_counts, under_one_id
from pdserve.engine.sglang.children.first_tokens import without_first
from pdserve.engine.sglang.children.scheduler import salted
from pdserve.engine.sglang.continuation import Continuation, extend_prompt, marked
from pdserve.engine.sglang.exact_turns import SglangTurns
from pdserve.engine.sglang.first_tokens import digest_of, take
from pdserve.engine.sglang.long_texts import SHORT_CHARS, TextThreads, chars
from pdserve.engine.sglang.serving import chat_class
from pdserve.engine.sglang.text_offsets import locate
from pdserve.engine.turns.exact import Turn
from pdserve.errors import RequestError
from pdserve.pages import namespace_seed, page_hashes

REMEMBERED: Final = 65_536
"""Prompts whose ranks are known. 150 bytes each."""
MORE_REQUESTS: Final = 8
"""A rank may have so many requests more than twice those of the idlest, and still gets its conversations."""


class DpRanks:
    """Of one worker. A conversation is known by the last full page of each prompt, not by pages that many
    conversations begin with.
    """

    def __init__(self, ranks: int, remembered: int = REMEMBERED) -> None:
        self.count = ranks
        self._remembered = remembered
        self._rank_of: OrderedDict[bytes, int] = OrderedDict()  # by a prompt's last page
        self._last = -1

    def choose(self, chain: Sequence[bytes], running: Sequence[int]) -> int:
        """The rank of a prompt. `chain`: digests of its full pages. `running`: requests of each rank."""
        rank = self._home(chain)
        if rank is None or running[rank] > 2 * min(running) + MORE_REQUESTS:
            turns = range(self._last + 1, self._last + 1 + self.count)
            rank = self._last = min((turn % self.count for turn in turns), key=running.__getitem__)
        if chain:
            self._rank_of[chain[-1]] = rank
            self._rank_of.move_to_end(chain[-1])
            while len(self._rank_of) > self._remembered:
                self._rank_of.popitem(last=False)
        return rank

    def _home(self, chain: Sequence[bytes]) -> int | None:
        found = (self._rank_of.get(digest) for digest in reversed(chain))
        return next((rank for rank in found if rank is not None), None)


_SET_BY_SGLANG: Final = (
    *("rid", "lora_id", "mm_hashes", "positional_embed_overrides"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
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
    first_digest: str = ""  # of a prefill: what its token follows from
    has_first: bool = False  # its answer begins with a token that a prefill worker has sampled
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

    def is_early(self, answer_tokens: int, finish: Any) -> bool:
        """Whether an output with so many tokens was sent before anything was computed here."""
        return self.has_first and answer_tokens <= 1 and not finish

    def abort(self) -> None:
        assert self.tell_abort is not None
        self.tell_abort(self.rid)


class TrackedRequests:
    """Mixed into SGLang's TokenizerManager, before it; see the module's docstring. Used in its event loop."""

    tokenizer: Any
    mm_processor: Any
    model_config: Any
    server_args: Any
    rid_to_state: dict[str, Any]
    elastic_worker_count: int
    incremental_streaming_output: bool
    async_dynamic_batch_tokenizer: Any

    def track(
        self,
        metrics: WorkerMetrics | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        turns: SglangTurns | None = None,
        namespace: str = "",
    ) -> None:
        """Begin, once SGLang has made this object. `is_stopping`: this server's end aborts what runs.
        `turns`: gives prompts the tokens that they had before. `namespace`: of the worker's pages; without
        one first tokens are neither told nor taken.
        """
        self._metrics = metrics
        self._is_stopping = is_stopping
        self._turns = turns
        self._namespace = namespace
        self._media_is_named = names_media(self)
        ranks = int(self.elastic_worker_count)
        self._dp_ranks = DpRanks(ranks) if ranks > 1 else None
        self.text_threads = TextThreads()
        self._special_ids = frozenset(
            getattr(self.tokenizer, "all_special_ids", ())
        )  # a property that is computed anew
        self._made: WeakValueDictionary[str, SglangRequest] = WeakValueDictionary()
        """By SGLang's request id, as long as the HTTP request's record holds them."""

    @property
    def serving_chat_class(self) -> type[Any]:
        """For SGLang."""
        return chat_class()

    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        http = current_request()
        contents = self._noted(obj, request, http)
        if http is None or not getattr(obj, "stream", False):
            return contents
        if http.stream is not None:
            wanted = obj.return_prompt_token_ids or self.incremental_streaming_output
            contents = marked(
                contents,
                http.stream,
                self._continuation_of,
                token_ids_are_wanted=wanted,
                choices=lambda: getattr(obj, "parallel_sample_num", 1) or 1,
            )
        return contents if http.path == GENERATE else under_one_id(contents)

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        """SGLang tokenizes in its event loop, and no stream goes on meanwhile. Here long texts are tokenized
        in a thread; tokenizers in Rust let other threads run.
        """
        tokenize = functools.partial(super()._tokenize_texts, texts, is_cross_encoder)  # type: ignore[misc]
        size_chars = chars(texts)
        if self.async_dynamic_batch_tokenizer is not None or size_chars <= SHORT_CHARS:
            return await tokenize()
        return await self.text_threads.finish(tokenize, size_chars)

    def _reuse_of(self, rid: str, answer_tokens: int, finish: Any) -> Reuse | None:
        made = self._made.get(rid)
        return None if made is None or made.is_early(answer_tokens, finish) else made.reuse

    def _continuation_of(self, rid: str) -> Continuation | None:
        made = self._made.get(rid)
        return None if made is None else made.continuation

    async def _noted(self, obj: Any, request: Any, http: HttpRequest | None) -> AsyncGenerator[Any, None]:
        if http is not None or (request is not None and request.scope["path"] == EMBEDDINGS):
            kept = ("rid",) if http is not None and http.path == RESPONSES else ()
            _disown(obj, kept)
        if (salt := salt_of_request()) is not None and hasattr(obj, "cache_salt"):
            obj.cache_salt = salt
        if (room := bootstrap_of_request()) is not None and hasattr(obj, "bootstrap_room"):
            obj.bootstrap_host, obj.bootstrap_port, obj.bootstrap_room = room
        turn = None if self._turns is None else await self._turns.begin(obj, http)
        has_offsets = http is not None and http.path == COMPLETIONS and obj.return_logprob
        is_echoed = has_offsets and obj.logprob_start_len == 0
        try:
            generated = super().generate_request(obj, request)  # type: ignore[misc]
            async with contextlib.aclosing(generated) as contents:
                async for content in contents:
                    answers = content if isinstance(content, list) else [content]
                    self._note(http, answers)
                    for answer in answers if has_offsets else ():
                        locate(answer["meta_info"], self.tokenizer, self._special_ids, is_echoed=is_echoed)
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
        if http.first is None and not self._are_early(answers):
            http.first = first_token(answers)
            if self._metrics is not None:
                self._metrics.count(http.first, http.reuse.by_tier())

    def _are_early(self, answers: Sequence[dict[str, Any]]) -> bool:
        meta = (answers[0].get("meta_info") or {}) if answers else {}
        made = self._made.get(meta.get("id", ""))
        return made is not None and made.is_early(meta.get("completion_tokens", 0), meta.get("finish_reason"))

    async def _record(self, turn: Turn, http: HttpRequest, answers: Sequence[dict[str, Any]]) -> None:
        """The answers that are finished with these."""
        for answer in answers:
            meta = answer.get("meta_info") or {}
            made = self._made.get(meta.get("id", ""))
            if self._turns is None or made is None or made.input_ids is None or is_aborted(answer):
                continue
            if meta.get("finish_reason"):
                await self._turns.end(turn, http, made.input_ids, list(made.state.output_ids))

    def _init_req_state(self, obj: Any, request: Any = None) -> Any:
        result = super()._init_req_state(obj, request)  # type: ignore[misc]
        http = current_request()
        if http is not None:
            if not http.requests:
                http.reuse.begin(getattr(obj, "batch_size", 1), getattr(obj, "parallel_sample_num", 1))
            for rid in [obj.rid] if isinstance(obj.rid, str) else obj.rid:
                made = SglangRequest(rid, self.rid_to_state[rid], reuse=http.reuse, tell_abort=self._abort)
                http.requests[rid] = self._made[rid] = made
        return result

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError for what would end the scheduler."""
        tokenized = super()._create_tokenized_object(obj, *args, **kwargs)  # type: ignore[misc]
        _bound(obj, tokenized, self.model_config.vocab_size)
        if not hasattr(tokenized, "cache_salt"):  # to be embedded
            tokenized.lora_name = salted(tokenized.lora_name, salt_of_request())
        return tokenized

    def _abort(self, rid: str) -> None:
        self.abort_request(rid=rid)  # type: ignore[attr-defined]

    async def _handle_batch_output(self, output: Any) -> None:
        note_counts(output, self._reuse_of)
        await super()._handle_batch_output(output)  # type: ignore[misc]

    async def _send_one_request(self, tokenized: Any) -> Any:
        made = await self._prepared([tokenized])
        result = await super()._send_one_request(tokenized)  # type: ignore[misc]
        _abort_left(made)
        return result

    async def _send_batch_request(self, tokenized: Any) -> Any:
        made = await self._prepared(list(tokenized))
        result = await super()._send_batch_request(tokenized)  # type: ignore[misc]
        _abort_left(made)
        return result

    async def _prepared(self, tokenized: list[Any]) -> list[SglangRequest]:
        """The records of requests that go to the scheduler next."""
        http = current_request()
        if http is None:
            return []
        pairs = [(made, one) for one in tokenized if (made := self._made.get(one.rid))]
        for made, one in pairs:
            self._extend(http, made, one)
            self._note_first(http, made, one)
            _name(made, one, token_ids(one, media_is_named=self._media_is_named))
            if self._dp_ranks is not None:
                await self._place(self._dp_ranks, made, one)
            http.reuse.sent(one.rid)
        return [made for made, _ in pairs]

    async def _place(self, ranks: DpRanks, made: SglangRequest, tokenized: Any) -> None:
        """Choose the data parallel rank of a request, unless a client or a direct hand-off has chosen it."""
        asked = (tokenized.routed_dp_rank, tokenized.bootstrap_room)
        if made.input_ids is None or asked != (None, None):
            return
        seed = namespace_seed(made.extra_key, made.cache_salt)
        hashed = functools.partial(page_hashes, made.input_ids, self.server_args.page_size, seed)
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
            made.continuation = extend_prompt(tokenized, http.stream.so_far, self)
        except ValueError as error:
            http.stream.refuse(RequestError(400, str(error)))
            raise

    def _note_first(self, http: HttpRequest, made: SglangRequest, tokenized: Any) -> None:
        """Of a prefill: what its token follows from. Else the answer begins with the token that came."""
        if not self._namespace or len(http.requests) != 1 or made.continuation is not None:
            return
        if http.path == PREFILL and tokenized.input_ids is not None:
            made.first_digest = digest_of(tokenized, self._namespace)
        elif http.first_token:
            vocabulary = self.model_config.vocab_size
            made.has_first = take(http.first_token, tokenized, self._namespace, vocabulary)


@functools.cache
def manager_class() -> type[Any]:
    """For SGLang's parameter `TokenizerManagerClass`. Imports SGLang."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    return type("PdserveTokenizerManager", (TrackedRequests, TokenizerManager), {})


def _abort_left(made: list[SglangRequest]) -> None:
    """Where the client has left while its requests went to the scheduler, these are aborted."""
    http = current_request()
    if http is not None and http.left.is_set():
        http.is_cut_short = True
        for one in made:
            one.abort()


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
        without_first(sampling)  # a client has no say in it
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
