"""The stages before decode: waiting for the previous turn's pages, and having the prompt computed, its
pages pulled ahead meanwhile.

Neither fails a request: what a stage could not do, the decode worker does itself. Only what a prefill worker
says is the client's own fault ends the request here.

A prefill may be hedged: when the first worker has not answered within `hedge_prefill_s`, a second one is
asked the same, within the retry budget; who answers well first wins, the other is cut. Off by default: it
computes some prompts twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from pdserve.errors import PdserveError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.retry_budget import RetryBudget
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.log_throttle import ThrottledLog
from pdserve.router.metrics.names import CACHES, TIERS, turn_label
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan, Settle, choose_alternate
from pdserve.router.request.cache_report import PREFILL_CACHED_HEADER, cached_words
from pdserve.router.request.call import Call
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.response import UpstreamError

logger = logging.getLogger(__name__)

SETTLE_SLACK_S = 0.25
"""On top of the time that the worker itself was given to wait."""
MAX_ERROR_BYTES = 1024 * 1024
MAX_PROMPTS_TOLD = 1024
"""Some 16 KiB of header."""
CLIENT_FAULTS = frozenset((400, 413, 422))
"""Prefill's answers that are final. Others, like 404 or 429, may be the worker's own trouble; if they are
not, the decode worker will say the same."""
UNFIT = frozenset((502, 503, 504))
"""Answers that speak of the worker and not of the request: counted against its circuit."""
GOOD = frozenset(("ok", "partial"))
"""Outcomes of a prefill that need no better one."""


class PrefillReport(msgspec.Struct):
    """A prefill worker's 200 answer."""

    prompt_tokens: int
    published_pages: int
    missing_pages: int
    cached: dict[str, int] = {}
    cached_by_prompt: list[tuple[int, int, int]] = []
    prefill_ms: float = 0.0
    publish_ms: float = 0.0

    @property
    def by_tier(self) -> dict[str, int]:
        """Prompt tokens by where they came from."""
        tokens = {tier: max(0, self.cached.get(tier, 0)) for tier in CACHES}
        return {**tokens, "computed": max(0, self.prompt_tokens - sum(tokens.values()))}


def prefilled_header(cached_by_prompt: list[tuple[int, int, int]]) -> bytes:
    """Tells the decode worker what was cached before prefill, of every prompt: what it finds itself is what
    prefill has just put there. Of more than MAX_PROMPTS_TOLD prompts nothing is said.
    """
    if not 0 < len(cached_by_prompt) <= MAX_PROMPTS_TOLD:
        return b""
    each = ",".join(f"{device}/{host}/{pool}" for device, host, pool in cached_by_prompt)
    return b"x-pdserve-prefilled: %b\r\n" % each.encode("ascii")


class SettledReport(msgspec.Struct):
    """A decode worker's answer to `/pd/settled`."""

    known: bool
    settled: bool


class WorkerAnswerError(PdserveError):
    """A worker answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


_report_decoder = msgspec.json.Decoder(PrefillReport)
_settled_decoder = msgspec.json.Decoder(SettledReport)


class Stages:
    """Settle and prefill."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        upstream: Upstream,
        stats: Stats,
        placer: Placer,
        budget: RetryBudget,
        failures: ThrottledLog,
    ) -> None:
        self._deadlines = config.deadlines
        self._pull_ahead_tokens = config.pull_ahead_tokens
        self._fleet = fleet
        self._upstream = upstream
        self._stats = stats
        self._placer = placer
        self._budget = budget
        self._failures = failures
        self._loop = asyncio.get_running_loop()

    async def settle(self, call: Call, settle: Settle) -> str:
        """Wait, bounded, until the previous turn's pages are in the pool. Never fails."""
        wait_s = self._deadlines.settle_s
        if wait_s <= 0:
            return "settle=off"
        call.phase = "settle"
        begun_s = self._loop.time()
        body = msgspec.json.encode({"request_id": settle.request_id, "timeout_s": wait_s})
        try:
            answer = await self._post_json(call, settle.worker, "/pd/settled", body, wait_s + SETTLE_SLACK_S)
            report = _settled_decoder.decode(answer)
            outcome: str = "unknown" if not report.known else "settled" if report.settled else "unsettled"
        except UpstreamError as error:
            outcome = error.kind
        except WorkerAnswerError as error:
            outcome = f"status-{error.status}"
        except UNREADABLE:
            outcome = "garbage"
        self._stats.settle[outcome] += 1
        call.parts_s["settle"] = self._loop.time() - begun_s
        return f"settle={outcome}"

    # --- prefill

    async def prefill(self, call: Call, plan: Plan, worker: Worker) -> str:
        """Have the prompt computed and published. Raises WorkerAnswerError when the request itself is at
        fault.
        """
        call.phase = "prefill"
        begun_s, hedge_s = self._loop.time(), self._deadlines.hedge_prefill_s
        is_long = 0 < self._pull_ahead_tokens <= plan.uncached_tokens
        pulling = self._loop.create_task(self._pull_ahead(call, plan.decode)) if is_long else None
        try:
            if hedge_s > 0:
                outcome = await self._hedged(call, plan, worker, hedge_s)
            else:
                outcome = await self._prefill_at(call, plan, worker)
        finally:
            if pulling is not None:
                pulling.cancel()  # hangs up
        spent_s, parts_s = self._loop.time() - begun_s, call.parts_s
        if "publish" in parts_s:  # the worker's word, not longer than what was seen here
            parts_s["publish"] = min(parts_s["publish"], spent_s)
        parts_s["prefill"] = spent_s - parts_s.get("publish", 0.0)
        return f"stage={outcome}"

    async def _pull_ahead(self, call: Call, decode: Worker) -> None:
        """Have the decode worker pull what prefill publishes, as it does, until cancelled. Never fails."""
        limit_s = self._deadlines.prefill_s + self._deadlines.publish_s
        outcome = "ok"  # when prefill is over first, too
        try:
            await self._post_json(call, decode, f"/pd/pull?endpoint={call.endpoint.path}", call.body, limit_s)
        except UpstreamError as error:
            outcome = error.kind
        except WorkerAnswerError as error:
            outcome = f"status-{error.status}"
        finally:
            self._stats.pull_ahead[outcome] += 1

    async def _hedged(self, call: Call, plan: Plan, worker: Worker, hedge_s: float) -> str:
        """The better of two outcomes, the second asked for if the first is slow: of who is there then."""
        asked = [self._loop.create_task(self._prefill_at(call, plan, worker))]
        try:
            done, running = await asyncio.wait(asked, timeout=hedge_s)
            now_s = self._loop.time()
            candidates = () if done else self._fleet.snapshot(call.model, now_s).prefill
            other = choose_alternate(candidates, (worker.id,))
            if other is None or not self._budget.take(now_s):
                return await asked[0]
            self._stats.hedges += 1
            asked.append(self._loop.create_task(self._counted(call, plan, other)))
            running.add(asked[1])
            outcome = ""
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                outcome = min((task.result() for task in done), key=lambda word: word not in GOOD)
                if outcome in GOOD:
                    break
            return outcome
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _counted(self, call: Call, plan: Plan, worker: Worker) -> str:
        self._fleet.on_selected(worker, self._loop.time())
        try:
            return await self._prefill_at(call, plan, worker)
        finally:
            self._fleet.on_released(worker)

    async def _prefill_at(self, call: Call, plan: Plan, worker: Worker) -> str:
        """The outcome at one worker, in one word."""
        limit_s = self._deadlines.prefill_s + self._deadlines.publish_s
        outcome: str
        is_unfit = True
        try:
            answer = await self._post_json(
                call, worker, f"/pd/prefill?endpoint={call.endpoint.path}", call.body, limit_s
            )
            report = _report_decoder.decode(answer)
        except UpstreamError as error:
            outcome, what, is_unfit = error.kind, str(error), error.kind != "busy"
        except WorkerAnswerError as error:
            if error.status in CLIENT_FAULTS:
                self._stats.prefill["client-error"] += 1
                self._fleet.on_success(worker)
                raise
            outcome, what, is_unfit = f"status-{error.status}", str(error), error.status in UNFIT
        except UNREADABLE as error:
            outcome, what = "garbage", f"its answer is no prefill report: {error}"
        else:
            self._fleet.on_success(worker)
            self._placer.on_prefilled(
                call.facts,
                plan,
                worker,
                report.cached,
                report.published_pages,
                report.missing_pages,
                self._loop.time(),
            )
            tokens = report.by_tier
            call.workers[:] = [
                (b"x-pdserve-prefill", worker.id_header),
                (PREFILL_CACHED_HEADER, cached_words(tokens)),
            ]
            call.prefilled = prefilled_header(report.cached_by_prompt)
            if call.meter is not None:
                call.meter.prompt_tokens = report.prompt_tokens
            call.parts_s["publish"] = max(0.0, report.publish_ms / 1e3)
            return self._count_prefill(call, plan, report, tokens)
        self._stats.prefill[outcome] += 1
        self._failures.warning(
            worker.id, "prefill worker %s: %s; the decode worker does it alone", worker.id, what
        )
        if is_unfit and self._fleet.on_failure(worker, self._loop.time()):
            logger.warning("prefill worker %s: circuit opened", worker.id)
        return outcome

    def _count_prefill(self, call: Call, plan: Plan, report: PrefillReport, tokens: Mapping[str, int]) -> str:
        stats = self._stats
        outcome = "partial" if report.missing_pages else "ok"
        stats.prefill[outcome] += 1
        stats.prompt_tokens += report.prompt_tokens
        stats.missing_pages += report.missing_pages
        for tier in CACHES:
            stats.cached_tokens[tier] += tokens[tier]
        if not call.prompt_counted:
            self.count_prompt(call, plan, tokens)
        return outcome

    def count_prompt(self, call: Call, plan: Plan, tokens: Mapping[str, int]) -> None:
        """Where the worker that computed the prompt had its tokens from."""
        call.prompt_counted = bool(tokens)
        turn = turn_label(plan.turn)
        for tier in TIERS:
            if tokens.get(tier):
                self._stats.turn_tokens[turn, tier] += tokens[tier]

    async def _post_json(self, call: Call, worker: Worker, target: str, body: bytes, limit_s: float) -> bytes:
        """A 200 answer's body. Raises UpstreamError, or WorkerAnswerError for another status."""
        end_s = self._loop.time() + limit_s
        exchange = await self._upstream.post(
            worker, target, call.upstream_headers, body, connect_s=self._deadlines.connect_s, head_s=limit_s
        )
        try:
            if exchange.complete:
                answer = exchange.take()
            else:
                left_s = max(0.0, end_s - self._loop.time())
                answer = await exchange.read_all(left_s, MAX_ERROR_BYTES)
            if exchange.status != 200:
                raise WorkerAnswerError(exchange.status, answer)
            return answer
        finally:
            exchange.release()
