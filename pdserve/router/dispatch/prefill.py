"""The stages before an answer: settle, and prefill.

The body that has a worker without `/pd/prefill` compute a prompt: the client's, for an answer of one
token. Pure.

Members are appended, and of a name that comes twice the last one counts (see `with_members`). So templates,
tools and media make the same prompt as in the client's request.

The settle stage: wait until the pages of the session's last turn are in the pool.

It never fails a call: pages that are missing then are computed again.

The prefill stage: a prefill worker computes the prompt and puts its pages into the pool.

It fails a call only when the prefill worker says that the request itself is at fault. After any other failure
the decode worker computes the prompt.

A worker without `/pd/prefill` is asked for an answer of one token instead, and the rest of its answer is
dropped. Its pages get to the decode worker by whatever cache the two share.

Pulling ahead (`pull_ahead_tokens`): while a long prompt is computed, the decode worker already reads the
pages that are published.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import with_members
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.job import (
    FAILURES,
    Job,
    WorkerAnswerError,
    WorkerRequests,
    cached_before_header,
    outcome_of,
    turns_header,
)
from pdserve.router.dispatch.suspicion import Suspects
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Count, Worker
from pdserve.router.metrics.names import CACHES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Settle
from pdserve.router.request.answer import PREFILL_HEADER
from pdserve.router.request.call import PREFILL_CACHED_HEADER, Call, cached_words

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


_settled_decoder = msgspec.json.Decoder(SettledReport)


class SettleStage:
    """Asks the worker of the last turn."""

    def __init__(self, wait_s: float, workers: WorkerRequests, stats: Stats) -> None:
        self._wait_s = wait_s
        self._workers = workers
        self._stats = stats

    async def run(self, call: Call, settle: Settle) -> str:
        """Wait, bounded. Returns the outcome as a word of the plan."""
        if self._wait_s <= 0:
            return "settle=off"
        if settle.worker.lacks("settled"):
            return "settle=absent"
        call.phase = "settle"
        begun_s = time.monotonic()
        question = msgspec.json.encode({"request_id": settle.request_id, "timeout_s": self._wait_s})
        try:
            answer = await self._workers.post(
                call, settle.worker, "/pd/settled", question, self._wait_s + SLACK_S
            )
            report = _settled_decoder.decode(answer)
            outcome = "unknown" if not report.known else "settled" if report.settled else "unsettled"
        except FAILURES as error:
            outcome = outcome_of(error)
        self._stats.settle[outcome] += 1
        call.parts_s["settle"] = time.monotonic() - begun_s
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

    def __post_init__(self) -> None:
        """Raises ValueError for words that may not become headers. msgspec's `pattern` looks at each report,
        and takes half of the time that reading one takes.
        """
        if self.missed and not _MISSED.fullmatch(self.missed):
            raise ValueError("missed: not the words of a report")
        if self.turns != "0" and not _TURNS.fullmatch(self.turns):
            raise ValueError("turns: no hexadecimal number")

    @property
    def by_tier(self) -> dict[str, int]:
        """Prompt tokens by where they came from."""
        found = self.cached or _NOTHING_CACHED
        computed = max(0, self.prompt_tokens - found.device - found.host - found.pool)
        return {"device": found.device, "host": found.host, "pool": found.pool, "computed": computed}


_NOTHING_CACHED = CachedTokens()
_decoder = msgspec.json.Decoder(PrefillReport)


class PrefillStage:
    """Asks prefill workers."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        workers: WorkerRequests,
        stats: Stats,
        placer: Placer,
        suspects: Suspects,
    ) -> None:
        self._limit_s = config.deadlines.prefill_s
        self._pull_ahead_tokens = config.pull_ahead_tokens
        self._fleet = fleet
        self._workers = workers
        self._stats = stats
        self._placer = placer
        self._suspects = suspects
        self._loop = asyncio.get_running_loop()

    async def run(self, call: Call, job: Job, worker: Worker) -> str:
        """Have the prompt computed and published. Returns the outcome as a word of the plan. Raises
        WorkerAnswerError when the request itself is at fault.
        """
        call.phase = "prefill"
        begun_s = time.monotonic()
        is_long = 0 < self._pull_ahead_tokens <= job.plan.uncached_tokens
        if is_long and job.plan.decode.lacks("pull"):
            is_long = False
            job.words.append("pull=absent")
        pulling = self._loop.create_task(self._pull_ahead(call, job.plan.decode)) if is_long else None
        try:
            outcome = await self.ask(call, job, worker, self._limit_s)
        finally:
            if pulling is not None:
                pulling.cancel()  # hangs up
        spent_s, parts_s = time.monotonic() - begun_s, call.parts_s
        if "publish" in parts_s:  # the worker reports it; it cannot be longer than what was measured here
            parts_s["publish"] = min(parts_s["publish"], spent_s)
        parts_s["prefill"] = spent_s - parts_s.get("publish", 0.0)
        return f"stage={outcome}"

    async def _pull_ahead(self, call: Call, decode: Worker) -> None:
        """Have the decode worker read pages as they are published, until cancelled. Never fails."""
        outcome = "ok"  # also when prefill ends first
        try:
            target = f"/pd/pull?endpoint={call.endpoint.path}"
            await self._workers.post(call, decode, target, call.body, self._limit_s)
        except FAILURES as error:
            outcome = outcome_of(error)
        finally:
            self._stats.pull_ahead[outcome] += 1

    async def ask(self, call: Call, job: Job, worker: Worker, limit_s: float) -> str:
        """The outcome at one worker, in one word. Raises WorkerAnswerError as `run`."""
        is_plain = worker.lacks("prefill")
        target = call.endpoint.path if is_plain else f"/pd/prefill?endpoint={call.endpoint.path}"
        body = one_token_body(call.endpoint, call.body) if is_plain else call.body
        attempt = await self._suspects.begin(call, worker)
        try:
            answer = await self._workers.post(call, worker, target, body, limit_s, job.room_line)
            report = None if is_plain else _decoder.decode(answer)
        except FAILURES as error:
            if isinstance(error, WorkerAnswerError) and error.status in CLIENT_FAULTS:
                self._stats.prefill["client-error"] += 1
                self._fleet.on_success(worker)
                raise
            attempt.on_failure(error)
            outcome = outcome_of(error)
            self._stats.prefill[outcome] += 1
            is_direct = job.plan.handoff == "direct"
            consequence = "another way is taken" if is_direct else "the decode worker computes the prompt"
            self._workers.on_failure(job, worker, error, consequence)
            return outcome
        finally:
            attempt.end()
        self._fleet.on_success(worker)
        if report is None:
            self._note_plain(call, job, worker)
            self._stats.prefill["ok"] += 1
            return "one-token"
        self._note(call, job, worker, report)
        outcome = "partial" if report.missing_pages else "ok"
        self._stats.prefill[outcome] += 1
        return outcome

    def _note_plain(self, call: Call, job: Job, worker: Worker) -> None:
        """A worker that answers a request for one token has the prompt in its memory, and tells no more of
        it.
        """
        self._placer.on_prefilled(call.facts, worker, 0, 0, self._loop.time())
        call.answer.prefill_headers = [(PREFILL_HEADER, worker.id_header)]

    def _note(self, call: Call, job: Job, worker: Worker, report: PrefillReport) -> None:
        """Tell placement, the decode worker, the client and the metrics what the prefill worker reports."""
        tokens, stats = report.by_tier, self._stats
        self._placer.on_prefilled(
            call.facts, worker, report.published_pages, report.missing_pages, self._loop.time()
        )
        job.cached_before = cached_before_header(report.cached_by_prompt)
        job.count_prompt(stats, tokens)
        call.answer.prefill_headers = [
            (PREFILL_HEADER, worker.id_header),
            (PREFILL_CACHED_HEADER, cached_words(tokens)),
        ]
        if report.missed:
            call.answer.missed.append(report.missed.encode())
        if call.answer.meter is not None:
            call.answer.meter.prompt_tokens = report.prompt_tokens
        if job.plan.handoff == "pool":
            job.turns_line = turns_header(report.turns)
            call.parts_s["publish"] = max(0.0, report.publish_ms / 1e3)
        stats.prompt_tokens += report.prompt_tokens
        stats.missing_pages += report.missing_pages
        for tier in CACHES:
            stats.cached_tokens[tier] += tokens[tier]
