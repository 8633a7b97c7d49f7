"""The roles of elastic workers, request by request. Pure.

For each request the workers of a snapshot are narrowed: those that may prefill it, and those that may answer
it. Elastic workers are among one of them, by their duty (`duties`). The duties follow the share of the load
that is prefill (`demand`, `wanted`), which is the mean of the placement's own sum over the prompts.

Workers do one thing only for the sake of the time between tokens. Where the level for it is kept with prompts
beside answers (`mixed_itl_ms`), the share that should prefill is 0. All workers then answer, and each
computes its own prompts, as aggregated ones do. Without such a level the duties stay apart.

A prompt that would be late at every prefilling worker is computed by an elastic worker that answers others,
if it is in time there and the others can bear it: the stall, spread over the tokens of an answer, keeps them
within the level.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from pdserve.router.config.placement import PlacementSettings
from pdserve.router.config.slo import ServiceLevel
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.cost import cost_ms
from pdserve.router.placement.elastic.demand import Demand
from pdserve.router.placement.elastic.duties import Duties
from pdserve.router.placement.elastic.forecast import alone_ms, step_ms
from pdserve.router.placement.elastic.wanted import Wanted, mixed_itl_ms, wanted
from pdserve.router.placement.prefix_index import NOTHING, Places

MIX_BELOW: Final = 0.8
"""Of `itl_ms`: workers begin to do both below this, and stop above `itl_ms` itself."""
ANSWER_TOKENS: Final = 128
"""A stall is spread over so many tokens of an answer."""


class _Model:
    """What is known of one model's load."""

    def __init__(self, level: ServiceLevel) -> None:
        self.demand = Demand(level.window_s)
        self.duties = Duties(level.dwell_s)
        self.is_mixed = False
        """Answers bear the prompts beside them, so that all workers may do both."""


class ElasticRoles:
    """Narrows snapshots, and says how many workers are wanted."""

    def __init__(self, weights: PlacementSettings, level: ServiceLevel, processes: int = 1) -> None:
        """`processes`: of this router; each one sees its part of the requests."""
        self._weights = weights
        self._level = level
        self._processes = processes
        self._models: dict[str, _Model] = {}

    def narrow(
        self, snapshot: Snapshot, prompt_tokens: int, places: Places | None, now_s: float, keeps: str = ""
    ) -> Snapshot:
        """The workers for one prompt. Unchanged where no worker is elastic. `keeps`: id of a worker that may
        answer whatever its duty is.
        """
        if not snapshot.elastic:
            return snapshot
        prefilling = self._update(snapshot, now_s)
        prefill = tuple(w for w in snapshot.prefill if w.role != "elastic" or w.id in prefilling)
        decode = tuple(w for w in snapshot.decode if w.id not in prefilling or w.id == keeps)
        lender = self._lender(prefill, decode, prompt_tokens, places)
        resting = tuple(w for w in snapshot.elastic if w.id in prefilling and w.id != keeps)
        return msgspec.structs.replace(
            snapshot,
            prefill=prefill if lender is None else (lender,),
            decode=decode,
            resting=resting,
        )

    def on_planned(self, snapshot: Snapshot, uncached_tokens: int, now_s: float) -> None:
        """A request with a prompt was planned, of which `uncached_tokens` have to be computed."""
        if not self.counts(snapshot):
            return
        if not snapshot.elastic:  # else `narrow` has just done it
            self._count_answering(snapshot, now_s)
        model = self._model(snapshot.model)
        model.demand.on_prompt(self._weights.prefill_ms_per_token * uncached_tokens, now_s)

    def wanted(self, snapshot: Snapshot, now_s: float) -> Wanted:
        """The workers that this router's requests for the model need."""
        self._count_answering(snapshot, now_s)
        known = [w.max_running for w in (*snapshot.decode, *snapshot.direct_decode) if w.max_running]
        load = self._model(snapshot.model).demand.load(now_s)
        return wanted(load, self._level, min(known, default=0))

    def wanted_of_role(self, snapshot: Snapshot, roles: Iterable[str], now_s: float) -> dict[str, float]:
        """The workers wanted of each of the roles, which are those in the fleet. Elastic and aggregated ones
        do what the others leave.
        """
        all_ = self.wanted(snapshot, now_s)
        left = self._beyond_fixed(snapshot, all_)
        both = left.prefill + left.decode
        return {role: {"prefill": all_.prefill, "decode": all_.decode}.get(role, both) for role in roles}

    def counts(self, snapshot: Snapshot) -> bool:
        """Whether the load is measured: where there is a level, or an elastic worker."""
        return bool(snapshot.elastic) or self._level.is_set

    def prefilling(self, model: str) -> frozenset[str]:
        """Ids of the elastic workers whose duty is to prefill."""
        return self._models[model].duties.prefilling if model in self._models else frozenset()

    def changes(self) -> dict[str, int]:
        """Changes of duties since the start, by model."""
        return {name: model.duties.changes for name, model in self._models.items()}

    def _count_answering(self, snapshot: Snapshot, now_s: float) -> None:
        """The workers that answer have a request from its plan on, also while another one computes its
        prompt.
        """
        there = (*snapshot.decode, *snapshot.direct_decode, *snapshot.draining)
        waiting = sum(w.prefilling for w in snapshot.prefill)
        answering = max(0, sum(w.answering for w in there) - waiting)
        self._model(snapshot.model).demand.on_answering(answering, now_s)

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(self._level)
        return model

    def _update(self, snapshot: Snapshot, now_s: float) -> frozenset[str]:
        """The ids of the elastic workers that prefill."""
        all_ = self.wanted(snapshot, now_s)
        left = self._beyond_fixed(snapshot, all_)
        share, model = left.prefill_share, self._model(snapshot.model)
        if share is not None and self._level.itl_ms:
            mine = model.demand.load(now_s).part(
                _ratio(left.prefill, all_.prefill), _ratio(left.decode, all_.decode)
            )
            itl_ms = mixed_itl_ms(mine, self._level, len(snapshot.elastic) / self._processes)
            model.is_mixed = itl_ms <= self._level.itl_ms * (1.0 if model.is_mixed else MIX_BELOW)
            share = 0.0 if model.is_mixed else share
        has_decode = any(w.role == "decode" for w in snapshot.decode)
        return model.duties.update(snapshot.elastic, share, has_decode=has_decode, now_s=now_s)

    def _beyond_fixed(self, snapshot: Snapshot, all_: Wanted) -> Wanted:
        """What workers of fixed roles leave to others, of this process's share of them."""
        prefill = sum(w.role == "prefill" for w in snapshot.prefill)
        decode = sum(w.role == "decode" for w in (*snapshot.decode, *snapshot.direct_decode))
        return all_.beyond(prefill / self._processes, decode / self._processes)

    def _lender(
        self,
        prefill: tuple[Worker, ...],
        decode: tuple[Worker, ...],
        prompt_tokens: int,
        places: Places | None,
    ) -> Worker | None:
        """The worker on decode duty that computes this prompt, for it is late elsewhere; None: no one."""
        limit_ms = self._level.ttft_ms
        if not limit_ms or not prefill or self._least_ms(prefill, prompt_tokens, places) <= limit_ms:
            return None
        able = [
            w
            for w in decode
            if w.role == "elastic"
            and self._cost_ms(w, prompt_tokens, places) <= limit_ms
            and self._is_bearable(w, prompt_tokens, places)
        ]
        return min(able, key=lambda w: (self._cost_ms(w, prompt_tokens, places), w.id), default=None)

    def _is_bearable(self, worker: Worker, prompt_tokens: int, places: Places | None) -> bool:
        if not self._level.itl_ms:
            return True
        cached = NOTHING if places is None else places.cached(worker)
        queued_ms = self._weights.prefill_ms_per_token * worker.queued_tokens
        stall_ms = queued_ms + alone_ms(self._weights, prompt_tokens, cached)
        each_ms = step_ms(self._level, worker.load) + stall_ms / ANSWER_TOKENS
        return each_ms <= self._level.itl_ms

    def _least_ms(self, workers: tuple[Worker, ...], prompt_tokens: int, places: Places | None) -> float:
        return min(self._cost_ms(worker, prompt_tokens, places) for worker in workers)

    def _cost_ms(self, worker: Worker, prompt_tokens: int, places: Places | None) -> float:
        cached = NOTHING if places is None else places.cached(worker)
        return cost_ms(self._weights, worker, prompt_tokens, cached)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
