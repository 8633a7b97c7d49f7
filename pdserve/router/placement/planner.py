"""The plan of one request: a pure function of the request, the fleet and the session's last turn.

Rules, in order:
1. Only workers of the request's model are eligible (see `fleet.registry`).
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
8. Decode workers are of one of two kinds, and say which (`/pd/info`). One kind computes prompts, and reads
   pages from the pool. The other takes the KV that a prefill worker sends it (`direct`), and computes no
   prompt. Where there are such, the way is chosen first (`choose_handoff`), and then the workers among those
   of that way. The direct way always has a prefill worker. If the prefill policy has none, the pool is the
   way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.eligible import Eligible
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import Ask, Choice, Policy
from pdserve.router.placement.prefix_index import Places, Prefix
from pdserve.router.sessions.keys import SessionKey
from pdserve.router.sessions.table import SessionEntry


class RequestFacts(msgspec.Struct, gc=False):
    """The facts of one request for planning. Nothing changes them once the request is understood."""

    endpoint: Endpoint
    model: str | None = None
    session: SessionKey | None = None
    is_turn: bool = False
    """The request is a turn of its session. Other requests, like tokenizing, fill no cache."""
    is_final: bool = False
    """No request of the session follows."""
    prompt_tokens_estimate: int = 0
    """0: the endpoint does not compute the prompt."""
    prompts: int = 1
    has_several_prompts: bool = False
    """The prompt is a list of prompts, also of a single one."""
    has_media: bool = False
    """Pages of images, videos and sound cannot be named yet: nobody can wait for them."""
    charged_tokens: int = 0
    """What it costs its tenant until its real use is known."""
    answers: int = 1
    """What it counts for as requests: prompts times answers of each."""
    choices: int = 1
    """Answers to each prompt that the client gets."""
    urgency: int = 0
    """What its `priority` means for the queue: more is sooner."""
    holder: str = ""
    """Id of the worker that holds what the request continues, in its own memory. Empty: any worker can."""
    can_be_direct: bool = True
    """A decode worker can answer it that computed no token of the prompt (see `request_body`)."""
    turn: int = 0
    """Number of the request for its model at this router. Equally good workers alternate by it."""
    draw: int = 0
    """A random number of 32 bits."""
    prefix: Prefix | None = None
    """The prompt's blocks. None: no policy uses them, or the endpoint does not compute the prompt."""


Handoff = Literal["pool", "direct"]
HandoffChoice = Literal["auto", "pool", "direct"]


def choose_handoff(
    wanted: HandoffChoice,
    possible: Collection[Handoff],
    *,
    home: Handoff | None,
    reused_tokens: int,
    pool_from_tokens: int,
) -> tuple[Handoff, str]:
    """The way, and why in one word. `possible` is not empty.

    `home`: the way of the worker that answered the session's last turn, if it is eligible: it has most of the
    prompt in its own memory. `reused_tokens`: estimated tokens of the prompt that some cache has.
    """
    if len(possible) == 1:
        return next(iter(possible)), "only"
    if wanted != "auto":
        return wanted, "configured"
    if home is not None:
        return home, "session"
    if reused_tokens >= pool_from_tokens:
        return "pool", "reused"
    return "direct", "new"


QUEUE_SHARE = 0.5
"""Of the tokens by which the prefill worker's queue is longer: what is added to `min_prefill_tokens`."""
MAX_DIRECT_TOKENS = 8192
"""Upper bound of the sum."""


class Settle(msgspec.Struct, frozen=True, gc=False):
    """Ask `worker` whether the pages of `request_id` are committed to the pool; wait for a bounded time."""

    worker: Worker
    request_id: str
    answered_s: float
    """When that answer was complete, as `SessionEntry.seen_s`."""


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
    handoff: Handoff = "pool"
    """direct: `prefill` sends its KV to `decode`, and both get the request at the same time."""
    has_fallback: bool = True
    """Some worker that computes prompts could answer in place of such a pair."""


class Planner(msgspec.Struct, frozen=True):
    """The settings that a plan depends on."""

    prefill_policy: Policy
    decode_policy: Policy
    prefill_endpoints: frozenset[str]
    min_prefill_tokens: int = 0
    weights: PlacementSettings = PlacementSettings()
    handoff: HandoffChoice = "auto"

    @property
    def needs_places(self) -> bool:
        """Whether plans depend on the places of prompts' prefixes."""
        return (
            self.min_prefill_tokens > 0 or self.prefill_policy.needs_places or self.decode_policy.needs_places
        )

    def plan(
        self,
        facts: RequestFacts,
        snapshot: Snapshot,
        last: SessionEntry | None,
        places: Places | None = None,
        wanted: HandoffChoice | None = None,
    ) -> Plan:
        """The plan of one request. `wanted`: the way to prefer; None: as configured. Raises NoWorkerError if
        no eligible worker may take it.
        """
        if facts.holder:
            return _plan_at_holder(facts, snapshot)
        sender: Choice | None = None
        why: tuple[str, ...] = ()
        candidates, others = snapshot.decode, snapshot.direct_decode
        if others:
            sender, why = self._choose_handoff(facts, snapshot, last, places, wanted or self.handoff)
            if sender is not None:
                candidates, others = others, candidates
        candidates = candidates or self._computing(facts, snapshot)
        last_id = None
        if last is not None and last.decode_id in snapshot.members:
            last_id = last.decode_id
            resting = snapshot.resting
            if last_id in others.by_id or (resting and any(worker.id == last_id for worker in resting)):
                last_id = None  # a worker of the other way, or of another duty now, is not gone
        name, turn = None, 0
        if facts.session is not None:
            name = facts.session.name
            if facts.is_turn:
                turn = 1 if last is None else last.turns + 1
        asked = Ask(facts.prompt_tokens_estimate, name, last_id, facts.turn, facts.draw, places)
        choice = self.decode_policy.choose(asked, candidates)
        decode = choice.worker
        if sender is None:
            prefill, why_prefill, cause = self._choose_prefill(facts, snapshot, decode, last, asked)
        else:
            prefill, why_prefill, cause = sender.worker, str(sender), sender.cause or sender.reason
        return Plan(
            decode,
            prefill,
            _settle(snapshot, last, decode, prefill) if turn and last is not None and last.answered else None,
            why + _words(str(choice) if choice.figures else choice.reason, why_prefill),
            _causes(choice.cause or choice.reason, cause),
            facts.prompt_tokens_estimate if places is None else _uncached(facts, prefill or decode, places),
            places,
            turn,
            "pool" if sender is None else "direct",
            sender is None or bool(snapshot.decode),
        )

    def _choose_handoff(
        self,
        facts: RequestFacts,
        snapshot: Snapshot,
        last: SessionEntry | None,
        places: Places | None,
        wanted: HandoffChoice,
    ) -> tuple[Choice | None, tuple[str, ...]]:
        """(the prefill worker that sends its KV, reason), where decode workers take it. None: the pool is
        the way.
        """
        sender = None
        if facts.can_be_direct and snapshot.direct_prefill and facts.endpoint.path in self.prefill_endpoints:
            last_id = None if last is None or last.prefill_id not in snapshot.members else last.prefill_id
            with contextlib.suppress(NoWorkerError):  # the session's prefill worker is gone
                sender = self.prefill_policy.choose(_ask(facts, last_id, places), snapshot.direct_prefill)
        possible: list[Handoff] = ["direct"] if sender is not None else []
        # beside workers of the direct way, aggregated workers are the fallback
        if not possible or any(wanted == "pool" or worker.role != "agg" for worker in snapshot.decode):
            possible.append("pool")
        handoff, why = choose_handoff(
            wanted,
            possible,
            home=_home(snapshot, last),
            reused_tokens=_reused(facts, snapshot, last, places),
            pool_from_tokens=self.weights.pool_from_tokens,
        )
        return sender if handoff == "direct" else None, (f"handoff={handoff}({why})",)

    @staticmethod
    def _computing(facts: RequestFacts, snapshot: Snapshot) -> Eligible:
        """The workers that can answer without a direct hand-off, where none computes prompts. Raises
        NoWorkerError.
        """
        if not snapshot.direct_decode:
            raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
        if facts.endpoint.task is None:  # it computes no prompt
            return snapshot.direct_decode
        if facts.can_be_direct:
            raise NoWorkerError("No prefill worker is ready to serve this model; try again shortly.")
        raise NoWorkerError(
            "This request (several prompts or answers, media, or facts about the prompt) needs a worker that "
            "computes prompts, and none is ready: an aggregated one, or a decode worker of the pool's way."
        )

    def _choose_prefill(
        self,
        facts: RequestFacts,
        snapshot: Snapshot,
        decode: Worker,
        last: SessionEntry | None,
        asked: Ask,
    ) -> tuple[Worker | None, str, str]:
        """(worker, reason with figures, reason as one word for metrics). No worker: no prefill stage."""
        if decode.role == "agg":
            return None, "agg", "agg"
        if facts.endpoint.path not in self.prefill_endpoints:
            return None, "no-stage", "no-stage"
        if facts.has_media and not _name_media(decode, *snapshot.prefill):
            return None, "media", "media"
        if not snapshot.prefill:
            word = "here" if snapshot.elastic else "none-ready"
            return None, word, word
        try:
            if last is not None:
                last_id = last.prefill_id if last.prefill_id in snapshot.members else None
                asked = msgspec.structs.replace(asked, last_id=last_id)
            choice = self.prefill_policy.choose(asked, snapshot.prefill)
        except NoWorkerError:
            return None, "session-worker-gone", "session-worker-gone"
        if choice.worker is decode:
            return None, "here", "here"
        if self.min_prefill_tokens and not facts.has_media:  # how many tokens an image has is not known here
            threshold = direct_threshold(self.min_prefill_tokens, choice.worker, decode)
            uncached = _uncached(facts, decode, asked.places)
            if uncached < threshold:
                return None, f"direct(uncached={uncached}<{threshold})", "direct"
        why = str(choice) if choice.figures else choice.reason
        return choice.worker, why, choice.cause or choice.reason


@functools.lru_cache(maxsize=256)
def _words(decode: str, prefill: str) -> tuple[str, str]:
    return f"decode={decode}", f"prefill={prefill}"


@functools.lru_cache(maxsize=256)
def _causes(decode: str, prefill: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("decode", decode), ("prefill", prefill)


def _name_media(*workers: Worker) -> bool:
    """A prefill worker that cannot name the pages of media answers before they are in the pool."""
    return all(worker.info is not None and worker.info.names_media for worker in workers)


def _plan_at_holder(facts: RequestFacts, snapshot: Snapshot) -> Plan:
    worker = snapshot.holding(facts.holder)
    if worker is None:
        raise NoWorkerError(
            "The worker that holds what this request continues is not ready; try again shortly."
        )
    return Plan(worker, reasons=("decode=holder", "prefill=holder"), causes=(("decode", "holder"),))


def direct_threshold(least: int, prefill: Worker, decode: Worker) -> int:
    """Least number of uncached tokens with which a prompt goes through the prefill stage.

    It is `least` if both queues are equally long. It grows with the prefill worker's queue, up to
    `MAX_DIRECT_TOKENS`, and falls with the decode worker's queue.
    """
    longer = prefill.queued_tokens - decode.queued_tokens
    return max(0, min(int(least + QUEUE_SHARE * longer), max(least, MAX_DIRECT_TOKENS)))


def _settle(snapshot: Snapshot, last: SessionEntry, decode: Worker, prefill: Worker | None) -> Settle | None:
    """Whom to ask for the pages of the last turn, which was answered (rule 6)."""
    if prefill is None and decode.id == last.decode_id:
        return None
    holder = snapshot.holding(last.decode_id)
    return None if holder is None else Settle(holder, last.request_id, last.seen_s)


def _home(snapshot: Snapshot, last: SessionEntry | None) -> Handoff | None:
    """The way of the worker of the session's last turn, if it is eligible."""
    if last is None:
        return None
    if last.decode_id in snapshot.direct_decode.by_id:
        return "direct"
    return "pool" if last.decode_id in snapshot.decode.by_id else None


def _reused(facts: RequestFacts, snapshot: Snapshot, last: SessionEntry | None, places: Places | None) -> int:
    """Estimated tokens of the prompt that some cache has."""
    of_session = 0 if last is None or not facts.is_turn else last.tokens
    known = 0.0
    if places is not None and snapshot.prefill:
        own = map(snapshot.prefill.by_incarnation.get, places.incarnations)
        known = max(places.in_pool.total, *(places.cached(worker).total for worker in own if worker), 0.0)
    return int(min(facts.prompt_tokens_estimate, max(of_session, known)))


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
