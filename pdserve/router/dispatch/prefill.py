"""The stages before an answer: settle, and prefill.

The body that has a worker without `/pd/prefill` compute a prompt: the client's, for an answer of one
token. Pure.

Members are appended, and of a name that comes twice the last one counts (see `with_members`). So templates,
tools and media make the same prompt as in the client's request.

The settle stage: wait until the pages of the session's last turn are in the pool.

It never fails a call: pages that are missing then are computed again.

The prefill stage: a prefill worker computes the prompt and puts its pages into the pool.

It fails a call only when the prefill worker says that the request itself is at fault. After any other failure
the decode worker computes the prompt. A prompt that is being computed for another call is waited for: see
`shared_prefill`.

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
    Claim,
    Job,
    WorkerAnswerError,
    WorkerRequests,
    cached_before_header,
    outcome_of,
    turns_header,
)
from pdserve.router.dispatch.shared_prefill import Computed, SharedPrefills
from pdserve.router.dispatch.suspicion import Suspects
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Count, Worker
from pdserve.router.metrics.names import CACHES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Settle, choose_alternate, direct_threshold
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
        self._min_tokens = config.min_prefill_tokens
        self._shared = SharedPrefills()
        self._loop = asyncio.get_running_loop()

    async def run(self, call: Call, job: Job, claim: Claim) -> str:
        """Have the prompt computed and published; if that is done for another call now, wait for it. Releases
        the `claim`, which is of the prefill worker. Returns the outcome as a word of the plan. Raises
        WorkerAnswerError when the request itself is at fault.
        """
        call.phase = "prefill"
        begun_s, end_s = time.monotonic(), self._loop.time() + self._limit_s
        held: Claim | None = claim
        worker, uncached, computed = claim.worker, job.plan.uncached_tokens, None
        try:
            while not worker.lacks("prefill") and self._shared.begin(call, uncached):
                if held is not None:  # nothing is computed there for this call
                    held.release()
                    held = None
                if (found := await self._shared.wait(call, end_s)) is None:
                    break  # it leads now
                uncached, worker = found.rest_tokens(call.facts), found.worker
                is_short = uncached < direct_threshold(self._min_tokens, worker, job.plan.decode)
                if found.is_in_pool and (is_short or found.is_whole(call.facts)):
                    return self._note_shared(call, job, found)
            if held is None:
                worker = self._present(call, worker)
                held = Claim(self._fleet, worker, self._loop.time(), uncached, prefills=True)
            outcome = await self._compute(call, job, worker, end_s - self._loop.time())
            if outcome in ("ok", "partial"):
                computed = Computed(worker, outcome == "ok", job.turns_line)
            return f"stage={outcome}"
        except TimeoutError:  # of the wait; the decode worker computes the prompt
            self._stats.prefill["shared-timeout"] += 1
            return "stage=shared-timeout"
        finally:
            if held is not None:
                held.release()
            self._shared.end(call, computed)
            spent_s, parts_s = time.monotonic() - begun_s, call.parts_s
            if "publish" in parts_s:  # the worker reports it; it cannot be longer than what was measured here
                parts_s["publish"] = min(parts_s["publish"], spent_s)
            parts_s["prefill"] = spent_s - parts_s.get("publish", 0.0)

    def _present(self, call: Call, worker: Worker) -> Worker:
        """This prefill worker, or another one if it has gone meanwhile and there is one."""
        eligible = self._fleet.snapshot(call.model, self._loop.time()).prefill
        return worker if worker.id in eligible.by_id else choose_alternate(eligible, ()) or worker

    async def _compute(self, call: Call, job: Job, worker: Worker, limit_s: float) -> str:
        """Ask the worker, and meanwhile have the decode worker read what is published. Returns as `ask`."""
        is_long = 0 < self._pull_ahead_tokens <= job.plan.uncached_tokens
        if is_long and job.plan.decode.lacks("pull"):
            is_long = False
            job.words.append("pull=absent")
        pulling = self._loop.create_task(self._pull_ahead(call, job.plan.decode)) if is_long else None
        try:
            return await self.ask(call, job, worker, max(0.0, limit_s))
        finally:
            if pulling is not None:
                pulling.cancel()  # hangs up

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

    def _note_shared(self, call: Call, job: Job, found: Computed) -> str:
        """The prompt was computed for another call, and its pages are in the pool."""
        job.turns_line = found.turns_line
        call.answer.prefill_headers = [(PREFILL_HEADER, found.worker.id_header)]
        self._stats.prefill["shared"] += 1
        return "stage=shared"

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
