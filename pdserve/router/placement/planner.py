"""The plan of one request: a pure function of the request, the fleet and the session's last turn.

Rules, in order:
1. The model decides which workers count (see `models`).
2. A decode (or aggregated) worker is chosen by the decode policy. None eligible: 503.
3. A prefill worker is chosen by the prefill policy, unless the endpoint has no prefill stage or none is
   eligible: then the decode worker does it alone.
4. The decode worker does it alone, too, when the part of the prompt that neither it nor the pool is thought
   to have is short. What is short depends on the queues (`direct_threshold`). A session's next turn at its
   decode worker normally goes this way.
5. A session keeps to its workers only as long as they are there and not draining: one that has left, or is
   about to, moves its sessions however sticky they are.
6. If the session had a turn before and its pages are needed by someone other than the worker that has them
   (a prefill stage, another decode worker), that worker is asked first whether they are settled in the pool.
   Not while that turn is still being answered: a request that comes then is another one beside it. Nor for
   what is no turn itself (`RequestFacts.is_turn`).
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
"""Said to clients with a 503: workers are probed every second or so."""


class Settle(msgspec.Struct, frozen=True, gc=False):
    """Ask `worker` whether the pages of `request_id` are committed, and wait for it, bounded."""

    worker: Worker
    request_id: str


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Who does what for one request."""

    decode: Worker
    prefill: Worker | None = None
    settle: Settle | None = None
    reasons: tuple[str, ...] = ()
    """Words for the log line and the `x-pdserve-plan` header."""
    causes: tuple[tuple[str, str], ...] = ()
    """(role, word) for the metrics."""
    uncached_tokens: int = 0
    """Estimated prompt tokens to be computed, by the prefill worker if there is one."""
    places: Places | None = None
    """Where the prompt's beginning was thought to be when this was planned."""
    turn: int = 0
    """The session's so manieth turn, from 1; 0: none."""


class Planner(msgspec.Struct, frozen=True):
    """The settings that a plan depends on."""

    prefill_policy: Policy
    decode_policy: Policy
    prefill_endpoints: frozenset[str]
    min_prefill_tokens: int = 0
    weights: PlacementSettings = PlacementSettings()

    @property
    def needs_places(self) -> bool:
        """Whether plans depend on where prompts' beginnings live."""
        return (
            self.min_prefill_tokens > 0 or self.prefill_policy.needs_places or self.decode_policy.needs_places
        )

    def plan(
        self, facts: RequestFacts, snapshot: Snapshot, last: SessionEntry | None, places: Places | None = None
    ) -> Plan:
        """The plan of one request. Raises NoWorkerError."""
        if not snapshot.decode:
            raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
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
        """The worker, why in words with figures, and why in a word."""
        if decode.role == "agg":
            return None, "agg", "agg"
        if facts.endpoint.path not in self.prefill_endpoints:
            return None, "no-stage", "no-stage"
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


def direct_threshold(least: int, weights: PlacementSettings, prefill: Worker, decode: Worker) -> int:
    """Uncached tokens from which on a prompt goes through the prefill stage.

    `least` where both queues are as long; more where the prefill worker's is longer, up to
    `max_direct_tokens`, and less where the decode worker's is.
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
    """The least loaded of the candidates that were not tried, for a request whose worker failed."""
    tried = set(tried)
    return min((w for w in candidates if w.id not in tried), key=lambda w: w.load, default=None)
