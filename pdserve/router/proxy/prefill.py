"""Before the answer: settle, and the prefill stage.

A prefill worker computes the prompt and puts its pages into the pool. It fails a request only when it says
that the request itself is at fault. After any other failure the decode worker computes the prompt. A prompt
that is being computed for another request is waited for: see `shared_prefill`.

A worker without `/pd/prefill` is asked for an answer of one token instead: the client's body with members
appended, of which the last counts (see `with_members`), so templates, tools and media make the same prompt.
The rest of its answer is dropped. Its pages get to the decode worker by whatever cache the two share.

Pulling ahead (`pull_ahead_tokens`): while a long prompt is computed, the decode worker already reads the
pages that are published. It is asked a moment later than the prefill worker, so not at all for a prompt that
this one has in its caches, as it has of most turns.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from time import monotonic
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import with_members
from pdserve.router.fleet.worker import Count, Worker
from pdserve.router.http.driven import Driven
from pdserve.router.http.worker_connection import Waiter, WorkerConnection
from pdserve.router.metrics.names import CACHES, TIERS, turn_label
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import Settle, choose_alternate, direct_threshold
from pdserve.router.proxy.failures import FAILURES, WorkerAnswerError, outcome_of
from pdserve.router.proxy.parts import MAX_ERROR_BYTES, Parts
from pdserve.router.proxy.shared_prefill import Computed
from pdserve.router.request.reports import CACHED_WORDS
from pdserve.router.request.request import Request

PULL_AFTER_S: Final = 0.05
"""From asking the prefill worker to asking the decode worker to pull: the first chunk takes longer."""
_OF_OPENAI: Final[dict[str, Any]] = {
    "stream": False,
    "stream_options": None,
    "n": 1,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
}
_BY_PATH: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": _OF_OPENAI,
    "/v1/completions": {name: value for name, value in _OF_OPENAI.items() if name != "max_completion_tokens"},
    "/v1/messages": {"stream": False, "max_tokens": 1},
    "/generate": {"stream": False},
}
"""For each endpoint with a prefill stage. SGLang's own has its parameters in a member of their own; no other
engine has it.
"""


def one_token_body(endpoint: Endpoint, body: bytes) -> bytes:
    """`body`: a JSON object."""
    return with_members(body, _BY_PATH[endpoint.path])


SLACK_S = 0.25
"""Added to the time that the worker itself may wait."""


class SettledReport(msgspec.Struct):
    """A decode worker's answer to `/pd/settled`."""

    known: bool
    settled: bool


_decode_settled = msgspec.json.Decoder(SettledReport).decode


async def settle(parts: Parts, request: Request, asked: Settle) -> str:
    """Wait until the pages of the session's last turn are in the pool, for so long after its answer at most.
    A turn that comes later asks nobody. Never fails: pages that are missing then are computed again. Returns
    the outcome as a word of the plan.
    """
    wait_s = parts.limits_s.settle_s
    if wait_s <= 0:
        return "settle=off"
    wait_s -= parts.loop.time() - asked.answered_s
    if wait_s <= 0:
        return "settle=past"
    worker, info = asked.worker, asked.worker.info
    if info is not None and "settled" in info.lacks:
        return "settle=absent"
    request.phase = "settle"
    begun_s = monotonic()
    question = msgspec.json.encode({"request_id": asked.request_id, "timeout_s": wait_s})
    try:
        up = await parts.upstream.exchange(
            request, worker, b"/pd/settled", request.lines, question, wait_s + SLACK_S, None, MAX_ERROR_BYTES
        )
        if up.status != 200:
            raise WorkerAnswerError(up.status, b"")
        report = _decode_settled(up.rest)
        outcome = "unknown" if not report.known else "settled" if report.settled else "unsettled"
    except FAILURES as error:
        outcome = outcome_of(error)
    parts.stats.settle[outcome] += 1
    request.parts_s["settle"] = monotonic() - begun_s
    return f"settle={outcome}"


CLIENT_FAULTS = frozenset((400, 413, 422))
"""Statuses of a prefill worker that end the call. Another one, like 404 or 429, may be this worker's trouble;
if not, the decode worker says the same.
"""
GOOD = frozenset(("ok", "partial", "one-token"))
"""Outcomes of a prefill that need no better one."""

_MISSED: Final = re.compile(r"[a-z0-9_=;., ]*")
_TURNS: Final = re.compile(r"[0-9a-f]*")


class CachedTokens(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens that a worker had in its caches, by tier."""

    device: Count = 0
    host: Count = 0
    pool: Count = 0


class PrefillReport(msgspec.Struct):
    """A prefill worker's 200 answer."""

    prompt_tokens: Count
    published_pages: Count
    missing_pages: Count
    cached: CachedTokens | None = None
    cached_by_prompt: list[tuple[Count, Count, Count]] = []
    missed: Annotated[str, Meta(max_length=512)] = ""
    """Why full pages were computed, as `x-pdserve-miss` tells it."""
    prefill_ms: float = 0.0
    publish_ms: float = 0.0
    turns: Annotated[str, Meta(max_length=1024)] = "0"
    """Which earlier answers it gave recorded tokens, a bit for each segment of the prompt."""
    first: Annotated[str, Meta(max_length=64)] = ""
    """The answer's first token, and what it follows from, as a decode worker judges it. Empty: none."""

    def check(self) -> None:
        """Raises msgspec.ValidationError for words that may not become headers. msgspec's `pattern` looks at
        each report, and takes half of the time that reading one takes.
        """
        if self.missed and not _MISSED.fullmatch(self.missed):
            raise msgspec.ValidationError("missed: not the words of a report")
        if self.turns != "0" and not _TURNS.fullmatch(self.turns):
            raise msgspec.ValidationError("turns: no hexadecimal number")


_decode_report = msgspec.json.Decoder(PrefillReport).decode


MAX_PROMPTS_TOLD = 1024
"""About 16 KiB of header."""


NO_TURNS: Final = b"x-pdserve-turns: 0\r\n"


def cached_before_line(cached_by_prompt: list[tuple[int, int, int]]) -> bytes:
    """The header line that tells a decode worker what each prompt had cached (device, host, pool) before an
    earlier worker computed it. Empty for more than MAX_PROMPTS_TOLD prompts.
    """
    if not 0 < len(cached_by_prompt) <= MAX_PROMPTS_TOLD:
        return b""
    said = b""
    for each in cached_by_prompt:
        said += b",%d/%d/%d" % each
    return b"x-pdserve-prefilled: %b\r\n" % said[1:]


def count_prompt(stats: Stats, request: Request, tokens: Sequence[int]) -> None:
    """Count where the prompt's tokens came from; `tokens`: for each of `names.TIERS`. Called for the first
    worker that says so: a later one finds what the first one computed.
    """
    request.is_prompt_counted = True
    turn = turn_label(request.plan.turn)
    for tier, count in zip(TIERS, tokens, strict=True):
        if count:
            stats.turn_tokens[turn, tier] += count
    request.found_tokens = sum(tokens[:-1])


async def prefill(parts: Parts, request: Request, worker: Worker) -> str:
    """Have the prompt computed and published by the claimed worker; if that is done for another request now,
    wait for it. Releases the claim. Returns the outcome as a word of the plan. Raises WorkerAnswerError when
    the request itself is at fault.
    """
    request.phase, begun_s = "prefill", monotonic()
    prefix, info, limit_s = request.facts.prefix, worker.info, parts.limits_s.prefill_s
    is_foreign = info is not None and "prefill" in info.lacks
    is_long = request.prefill_tokens >= parts.pull_ahead_tokens
    try:
        if prefix is not None and prefix.digests and not is_foreign:
            outcome = await _shared(parts, request, worker)
        elif is_foreign or is_long or parts.suspicion.is_active:
            outcome = await _computed(parts, request, worker, limit_s)
        else:  # as `ask`, and nothing beside it
            try:
                target = request.endpoint.prefill_target
                up = await parts.upstream.exchange(
                    request, worker, target, request.lines, request.body, limit_s, None, MAX_ERROR_BYTES
                )
                outcome = _read(parts, request, worker, up)
            except FAILURES as error:
                outcome = _failed(parts, request, worker, error)
    finally:
        if request.prefills is worker:
            request.prefills = None
            parts.fleet.on_released(worker, request.prefill_tokens, 1)
        elif request.prefills is not None:
            release_prefill(parts, request)
        now_s = monotonic()
        if request.streams or request.trace is not None:
            spent_s, published_s, parts_s = now_s - begun_s, request.published_s, request.parts_s
            if published_s is None:
                parts_s["prefill"] = spent_s
            else:  # the worker reports it; it cannot be longer than what was measured here
                if not 0.0 <= published_s <= spent_s:
                    published_s = min(max(0.0, published_s), spent_s)
                parts_s["prefill"], parts_s["publish"] = spent_s - published_s, published_s
    request.asked_s = now_s  # the decode worker is asked at once
    return f"stage={outcome}"


def release_prefill(parts: Parts, request: Request) -> None:
    """The request is no load of its prefill worker any more."""
    worker, request.prefills = request.prefills, None
    assert worker is not None
    parts.fleet.on_released(worker, request.prefill_tokens, 1)


async def _shared(parts: Parts, request: Request, worker: Worker) -> str:
    """As `prefill`, for a prompt that another request may have computed. Returns the outcome."""
    shared, facts, computed = parts.shared_prefills, request.facts, None
    uncached, end_s = request.plan.uncached_tokens, parts.loop.time() + parts.limits_s.prefill_s
    try:
        while shared.begin(request, uncached):
            if request.prefills is not None:  # nothing is computed there for this request
                release_prefill(parts, request)
            if (found := await shared.wait(request, end_s)) is None:
                break  # it leads now
            uncached, worker = found.rest_tokens(facts), found.worker
            least = direct_threshold(parts.config.min_prefill_tokens, worker, request.plan.decode)
            if found.is_in_pool and (uncached < least or found.is_whole(facts)):
                return _note_shared(parts, request, found)
        if request.prefills is None:
            worker = _present(parts, request, worker)
            parts.fleet.on_selected(worker, parts.loop.time(), uncached, 1)
            request.prefills, request.prefill_tokens = worker, uncached
        outcome = await _computed(parts, request, worker, max(0.0, end_s - parts.loop.time()))
        if outcome in ("ok", "partial"):
            computed = Computed(worker, outcome == "ok", request.turns_line)
        return outcome
    except TimeoutError:  # of the wait; the decode worker computes the prompt
        parts.stats.prefill["shared-timeout"] += 1
        return "shared-timeout"
    finally:
        shared.end(request, computed)


def _present(parts: Parts, request: Request, worker: Worker) -> Worker:
    """This prefill worker, or another one if it has gone meanwhile and there is one."""
    eligible = parts.fleet.snapshot(request.model, parts.loop.time()).prefill
    return worker if worker.id in eligible.by_id else choose_alternate(eligible, ()) or worker


async def _computed(parts: Parts, request: Request, worker: Worker, limit_s: float) -> str:
    """As `ask`; where the prompt is long, the decode worker reads meanwhile what is published."""
    if request.plan.uncached_tokens < parts.pull_ahead_tokens:
        return await ask(parts, request, worker, limit_s, request)
    if request.plan.decode.lacks("pull"):
        request.words += ("pull=absent",)
        return await ask(parts, request, worker, limit_s, request)
    pulling: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal pulling
        pulling = parts.loop.create_task(_pull_ahead(parts, request))

    due = parts.loop.call_later(PULL_AFTER_S, begin)
    try:
        return await ask(parts, request, worker, limit_s, request)
    finally:
        due.cancel()
        if pulling is not None:
            pulling.cancel()  # hangs up


async def _pull_ahead(parts: Parts, request: Request) -> None:
    """Have the decode worker read pages as they are published, until cancelled. Never fails."""
    outcome = "ok"  # also when prefill ends first
    try:
        worker, target = request.plan.decode, f"/pd/pull?endpoint={request.endpoint.path}"
        limit_s = parts.limits_s.prefill_s
        answer = await parts.upstream.fetch(
            worker, target, request.lines, request.body, limit_s=limit_s, limit_bytes=MAX_ERROR_BYTES
        )
        if answer.status != 200:
            outcome = f"status-{answer.status}"
    except FAILURES as error:
        outcome = outcome_of(error)
    finally:
        parts.stats.pull_ahead[outcome] += 1


async def ask(parts: Parts, request: Request, worker: Worker, limit_s: float, owner: Driven | Waiter) -> str:
    """The outcome at one worker, in one word. `owner`: who is resumed. Raises WorkerAnswerError as
    `prefill`.
    """
    body, endpoint = request.body, request.endpoint
    target, is_foreign = endpoint.prefill_target, worker.lacks("prefill")
    if is_foreign:
        target, body = endpoint.target, one_token_body(endpoint, body)
    has_turn = parts.suspicion.is_active and await parts.suspects.take_turn(request)
    try:
        up = await parts.upstream.exchange(
            owner, worker, target, request.lines + request.room_line, body, limit_s, None, MAX_ERROR_BYTES
        )
        read = _read_foreign if is_foreign else _read
        return read(parts, request, worker, up)
    except FAILURES as error:
        return _failed(parts, request, worker, error)
    finally:
        if has_turn:
            parts.suspects.pass_turn()


def _read_foreign(parts: Parts, request: Request, worker: Worker, up: WorkerConnection) -> str:
    """As `_read`, of an answer of one token: its worker has the prompt in its memory, and tells no more."""
    if up.status != 200:
        raise WorkerAnswerError(up.status, up.take())
    parts.fleet.on_success(worker)
    parts.placer.on_prefilled(request.facts, worker, 0, 0, parts.loop.time())
    request.prefill_id = worker.id_header
    parts.stats.prefill["ok"] += 1
    return "one-token"


def _read(parts: Parts, request: Request, worker: Worker, up: WorkerConnection) -> str:
    """The outcome that an answer tells. Tell placement, the decode worker, the client and the metrics what it
    reports. Raises FAILURES.
    """
    if up.status != 200:
        raise WorkerAnswerError(up.status, up.take())
    report, stats, plan, turns_line = _decode_report(up.rest), parts.stats, request.plan, NO_TURNS
    if report.missed or report.turns != "0":
        turns_line = _note_words(request, report)
    if worker.circuit.failures:
        parts.fleet.on_success(worker)
    found, prompt_tokens, by_prompt = report.cached, report.prompt_tokens, report.cached_by_prompt
    stats.prompt_tokens += prompt_tokens
    if found is None or not (found.device or found.host or found.pool):
        tokens = 0, 0, 0, prompt_tokens
        if prompt_tokens and not request.is_prompt_counted:
            request.is_prompt_counted = True
            turn = turn_label(plan.turn) if plan.turn else "none"
            stats.turn_tokens[turn, "computed"] += prompt_tokens
    else:
        cached = found.device + found.host + found.pool
        tokens = found.device, found.host, found.pool, max(0, prompt_tokens - cached)
        for tier, count in zip(CACHES, tokens, strict=False):
            stats.cached_tokens[tier] += count
    if not request.is_prompt_counted:
        count_prompt(stats, request, tokens)
    if request.facts.prefix is not None:
        pages = report.published_pages, report.missing_pages
        parts.placer.on_prefilled(request.facts, worker, *pages, parts.loop.time())
    if len(by_prompt) == 1:
        request.cached_before = b"x-pdserve-prefilled: %d/%d/%d\r\n" % by_prompt[0]
    else:
        request.cached_before = cached_before_line(by_prompt)
    request.prefill_id, request.prefill_cached = worker.id_header, CACHED_WORDS % tokens
    if plan.handoff == "pool":
        request.turns_line, request.published_s = turns_line, report.publish_ms / 1e3
        if (first := report.first) and first.isalnum():  # else it could end the header
            request.cached_before += b"x-pdserve-first: %b\r\n" % first.encode()
    if request.meter is not None:
        request.meter.prompt_tokens = prompt_tokens
    if report.missing_pages:
        stats.missing_pages += report.missing_pages
        stats.prefill["partial"] += 1
        return "partial"
    stats.prefill["ok"] += 1
    return "ok"


def _note_words(request: Request, report: PrefillReport) -> bytes:
    """What only some reports say. Returns the line for the decode worker. Raises msgspec.ValidationError."""
    report.check()
    if report.missed:
        request.missed += (report.missed.encode(),)
    return b"x-pdserve-turns: %b\r\n" % (report.turns.encode() or b"0")


def _failed(parts: Parts, request: Request, worker: Worker, error: BaseException) -> str:
    """The outcome of a failure. Raises WorkerAnswerError where the request is at fault."""
    if isinstance(error, WorkerAnswerError) and error.status in CLIENT_FAULTS:
        parts.stats.prefill["client-error"] += 1
        parts.fleet.on_success(worker)
        raise error
    parts.suspects.on_failure(request, worker, error)
    outcome = outcome_of(error)
    parts.stats.prefill[outcome] += 1
    is_direct = request.plan.handoff == "direct"
    consequence = "another way is taken" if is_direct else "the decode worker computes the prompt"
    parts.on_failure(request, worker, error, consequence)
    return outcome


def _note_shared(parts: Parts, request: Request, found: Computed) -> str:
    """The prompt was computed for another request, and its pages are in the pool."""
    request.turns_line = found.turns_line
    request.prefill_id = found.worker.id_header
    parts.stats.prefill["shared"] += 1
    return "shared"
