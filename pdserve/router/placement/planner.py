"""The plan of one request: a pure function of the request, the fleet and the session's last turn.

Rules, in order:
1. Only workers of the request's model are eligible (see `models`).
2. The decode policy chooses a decode (or aggregated) worker. If none is eligible, the answer is 503.
3. The prefill policy chooses a prefill worker. If the endpoint has no prefill stage, the prompt has images or
   the like, or no prefill worker is eligible, the decode worker computes the prompt.
4. The decode worker also computes the prompt if its uncached part is short: the part that is estimated to be
   neither in that worker nor in the pool. The threshold depends on the queues (`direct_threshold`). A
   session's next turn normally goes this way.
5. A session stays with its workers only while they are members and not draining, even in mode hard.
6. A session's last turn may have left pages at one worker that another worker needs (a prefill worker, or
   another decode worker). Then the first worker is asked whether these pages are in the pool (`Settle`). It
   is not asked while that turn is still being answered, nor for a request that is no turn
   (`RequestFacts.is_turn`).
7. A request that continues what one worker holds goes to this worker, also while it is draining.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Policy
from pdserve.router.placement.prefix_index import Places
from pdserve.router.placement.request_facts import RequestFacts
from pdserve.router.sessions.table import SessionEntry

RETRY_AFTER_S = 1
"""`retry-after` of a 503, in seconds. Workers are probed about every second."""


class Settle(msgspec.Struct, frozen=True, gc=False):
    """Ask `worker` whether the pages of `request_id` are committed to the pool; wait for a bounded time."""

    worker: Worker
    request_id: str


class Plan(msgspec.Struct, frozen=True, gc=False):
    """The workers of one request, and the reasons for them."""

    decode: Worker
    prefill: Worker | None = None
    settle: Settle | None = None
    reasons: tuple[str, ...] = ()
    """Words for the log line and the `x-pdserve-plan` header."""
    causes: tuple[tuple[str, str], ...] = ()
    """(role, word) for the metrics."""
    uncached_tokens: int = 0
    """Estimated prompt tokens to compute, by the prefill worker if there is one."""
    places: Places | None = None
    """Estimated places of the prompt's prefix at the time of planning."""
    turn: int = 0
    """Number of the session's turn, from 1. 0: the request is no turn."""


class Planner(msgspec.Struct, frozen=True):
    """The settings that a plan depends on."""

    prefill_policy: Policy
    decode_policy: Policy
    prefill_endpoints: frozenset[str]
    min_prefill_tokens: int = 0
    weights: PlacementSettings = PlacementSettings()

    @property
    def needs_places(self) -> bool:
        """Whether plans depend on the places of prompts' prefixes."""
        return (
            self.min_prefill_tokens > 0 or self.prefill_policy.needs_places or self.decode_policy.needs_places
        )

    def plan(
        self, facts: RequestFacts, snapshot: Snapshot, last: SessionEntry | None, places: Places | None = None
    ) -> Plan:
        """The plan of one request. Raises NoWorkerError if no eligible worker may take it."""
        if not snapshot.decode and not facts.holder:
            raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
        if facts.holder:
            return _plan_at_holder(facts, snapshot)
        last_id = None if last is None or last.decode_id not in snapshot.members else last.decode_id
        choice = self.decode_policy.choose(_ask(facts, last_id, places), snapshot.decode)
        decode = choice.worker
        prefill, why_prefill, cause = self._choose_prefill(facts, snapshot, decode, last, places)
        settle = None
        before = last if last is not None and last.answered and facts.is_turn else None
        if before is not None and (prefill is not None or decode.id != before.decode_id):
            there = (*snapshot.decode, *snapshot.draining)
            holder = next((w for w in there if w.id == before.decode_id), None)
            if holder is not None:
                settle = Settle(holder, before.request_id)
        return Plan(
            decode,
            prefill,
            settle,
            (f"decode={choice}", f"prefill={why_prefill}"),
            (("decode", choice.cause or choice.reason), ("prefill", cause)),
            _uncached(facts, prefill or decode, places),
            places,
            0 if not facts.is_turn else 1 if last is None else last.turns + 1,
        )

    def _choose_prefill(
        self,
        facts: RequestFacts,
        snapshot: Snapshot,
        decode: Worker,
        last: SessionEntry | None,
        places: Places | None,
    ) -> tuple[Worker | None, str, str]:
        """(worker, reason with figures, reason as one word for metrics). No worker: no prefill stage."""
        if decode.role == "agg":
            return None, "agg", "agg"
        if facts.endpoint.path not in self.prefill_endpoints:
            return None, "no-stage", "no-stage"
        if facts.has_media:
            return None, "media", "media"
        if not snapshot.prefill:
            return None, "none-ready", "none-ready"
        last_id = None if last is None or last.prefill_id not in snapshot.members else last.prefill_id
        try:
            choice = self.prefill_policy.choose(_ask(facts, last_id, places), snapshot.prefill)
        except NoWorkerError:
            return None, "session-worker-gone", "session-worker-gone"
        if self.min_prefill_tokens:
            threshold = direct_threshold(self.min_prefill_tokens, self.weights, choice.worker, decode)
            uncached = _uncached(facts, decode, places)
            if uncached < threshold:
                return None, f"direct(uncached={uncached}<{threshold})", "direct"
        return choice.worker, str(choice), choice.cause or choice.reason


def _plan_at_holder(facts: RequestFacts, snapshot: Snapshot) -> Plan:
    there = (*snapshot.decode, *snapshot.draining)
    worker = next((worker for worker in there if worker.id == facts.holder), None)
    if worker is None:
        raise NoWorkerError(
            "The worker that holds what this request continues is not ready; try again shortly."
        )
    return Plan(worker, reasons=("decode=holder", "prefill=holder"), causes=(("decode", "holder"),))


def direct_threshold(least: int, weights: PlacementSettings, prefill: Worker, decode: Worker) -> int:
    """Least number of uncached tokens with which a prompt goes through the prefill stage.

    It is `least` if both queues are equally long. It grows with the prefill worker's queue, up to
    `max_direct_tokens`, and falls with the decode worker's queue.
    """
    longer = prefill.queued_tokens - decode.queued_tokens
    return max(0, min(int(least + weights.queue_share * longer), max(least, weights.max_direct_tokens)))


def _ask(facts: RequestFacts, last_id: str | None, places: Places | None) -> Ask:
    session = None if facts.session is None else facts.session.name
    return Ask(facts.prompt_tokens_estimate, session, last_id, facts.turn, facts.draw, places)


def _uncached(facts: RequestFacts, worker: Worker, places: Places | None) -> int:
    cached = 0.0 if places is None else places.cached(worker).total
    return max(0, int(facts.prompt_tokens_estimate - cached))


def choose_alternate(candidates: Iterable[Worker], tried: Iterable[str]) -> Worker | None:
    """The least loaded candidate not in `tried` (ids), for a request whose worker failed. None: all tried."""
    tried = set(tried)
    return min((w for w in candidates if w.id not in tried), key=lambda w: w.load, default=None)
