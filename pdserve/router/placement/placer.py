"""The router's memory for placement: sessions, and the places of prompts' prefixes. Pure.

A request asks for its `plan`. Its later events are reported by these methods, in this order, each at most
once, and not after a failure:

    plan -> on_prefilled (if the plan has that stage) -> on_answering -> on_answered
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet, Snapshot
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.elastic import ElasticRoles
from pdserve.router.placement.planner import HandoffChoice, Plan, Planner, RequestFacts
from pdserve.router.placement.policies import PolicySettings, make_policy
from pdserve.router.placement.prefix_index import PrefixTable
from pdserve.router.sessions.keys import named
from pdserve.router.sessions.table import SessionEntry, SessionTable, with_workers

PREFIX_BYTES: Final = 32 << 20
"""For the places of prompts' prefixes, about 400 bytes for each KiB of a prompt; what was not seen for the
longest time is dropped first.
"""


class Placer:
    """Plans requests, and remembers where they went."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._fleet = fleet
        self.sessions = SessionTable(
            config.session.capacity, config.session.ttl_s, is_private=bool(config.redis.url)
        )
        self.prefixes = PrefixTable(PREFIX_BYTES)
        self._planner = Planner(
            prefill_policy=make_policy(
                config.prefill_policy, PolicySettings(config.session, config.placement)
            ),
            decode_policy=make_policy(config.decode_policy, PolicySettings(config.session, config.placement)),
            prefill_endpoints=frozenset(config.prefill_endpoints),
            min_prefill_tokens=config.min_prefill_tokens,
            weights=config.placement,
            handoff=config.handoff,
        )
        self._is_hard = config.session.mode == "hard"
        self.elastic = ElasticRoles(config.placement, config.slo, config.processes)
        self._has_level = config.slo.is_set
        self.needs_prefix = self._planner.needs_places or config.slo.is_set or bool(config.elastic)
        """Whether planning uses `RequestFacts.prefix`, or what is expected of requests does."""

    def parents_turn(self, facts: RequestFacts, now_s: float) -> SessionEntry | None:
        """The last turn of the session that began this one, as if this one had had it: its prompt may begin
        as that one's does.
        """
        parent = "" if facts.session is None else facts.session.parent
        last = self.sessions.get(named(parent), now_s) if parent else None
        return None if last is None else msgspec.structs.replace(last, turns=0, tokens=0)

    def plan(
        self,
        facts: RequestFacts,
        snapshot: Snapshot,
        last: SessionEntry | None,
        now_s: float,
        wanted: HandoffChoice | None = None,
    ) -> Plan:
        """The plan of one request; `wanted` as in `Planner.plan`. Raises NoWorkerError."""
        if facts.prefix is None and not snapshot.elastic and not self._has_level:
            return self._planner.plan(facts, snapshot, last, None, wanted)
        places = None
        if facts.prefix is not None:
            places = self.prefixes.places(facts.prefix, now_s)
            worker = None if last is None else self._fleet.by_id.get(last.decode_id)
            if last is not None and worker is not None and last.incarnation in (worker.incarnation, ""):
                places.add(worker, last.tokens, now_s - last.seen_s)
        narrowed = snapshot
        if snapshot.elastic:
            keeps = last.decode_id if last is not None and self._is_hard else ""
            narrowed = self.elastic.narrow(snapshot, now_s, keeps)
        plan = self._planner.plan(facts, narrowed, last, places, wanted)
        if (snapshot.elastic or self._has_level) and facts.prompt_tokens_estimate and not facts.holder:
            self.elastic.on_planned(snapshot, plan.uncached_tokens, now_s)
        return plan

    def on_prefilled(
        self,
        facts: RequestFacts,
        worker: Worker,
        published_pages: int,
        missing_pages: int,
        now_s: float,
    ) -> None:
        """The prefill stage is complete: the worker's memory holds the prompt. Its pages are in the pool
        unless some are missing.
        """
        if facts.prefix is not None:
            in_pool = published_pages > 0 and not missing_pages
            self.prefixes.record(facts.prefix, worker, now_s, in_pool=in_pool)

    def on_answering(
        self,
        facts: RequestFacts,
        plan: Plan,
        worker: Worker,
        request_id: str,
        now_s: float,
        found_tokens: int = 0,
    ) -> SessionEntry | None:
        """`worker` has begun to answer. `found_tokens`: of the prompt, those that a cache had. Returns the
        session's new last turn, or None if it is no turn.
        """
        if facts.prefix is not None:
            self.prefixes.record(facts.prefix, worker, now_s, in_pool=worker.pool_up)
        session, prefill = facts.session, plan.prefill
        if session is None or not facts.is_turn:
            return None
        before = self.sessions.get(session, now_s)
        prefill_id = prefill.id if prefill else before.prefill_id if before else ""
        workers = before.workers if before else ()
        if session.is_named:
            known = dict(workers)
            for info in (worker.info, prefill.info if prefill else None):
                if info is not None and info.info_tag not in known:
                    turn = before.turns + 1 if before else 1
                    workers = with_workers(workers, ((info.info_tag, turn),))
        entry = SessionEntry(
            request_id,
            worker.id,
            now_s,
            prefill_id,
            facts.prompt_tokens_estimate,
            incarnation=worker.incarnation,
            turns=plan.turn,
            shared_tokens=found_tokens if before is None else before.shared_tokens,
            workers=workers,
        )
        self.sessions.record(session, entry)
        return entry

    def on_answered(
        self,
        facts: RequestFacts,
        turn: SessionEntry | None,
        answer_tokens: int,
        now_s: float,
    ) -> None:
        """The answer is complete: the worker's memory also holds its `answer_tokens`."""
        key = facts.session
        if key is None or turn is None:
            return
        if not facts.is_final:
            self.sessions.complete(key, turn, answer_tokens, now_s)
        elif self.sessions.get(key, now_s) is turn:
            self.sessions.forget(key)
