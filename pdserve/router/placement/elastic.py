"""Which elastic worker prefills and which one answers, and how many workers the load needs. Pure.

For each request the workers of a snapshot are narrowed: those that may prefill it, and those that may answer
it. Elastic workers are among one of them, by their duty. The duties follow the share of the load that is
prefill: the cost of the prompts of late against the requests in the answer.

Load. Each mean forgets with a time constant of `WINDOW_S`: what is `WINDOW_S` old counts 1/e. The means start
at 0, so they are divided by the weight of the time since the first event, at least LEAST_WEIGHT. Arrivals are
events, so only their mean says anything. The requests in the answer are a state, whose present number is
known: where it is above the mean, it counts. So a load that turns to long answers is seen at once.

Workers wanted, prefill: each worker is a queue with one server (M/G/1) that gets its share of the prompts.
The mean wait in such a queue is rate · E[S²] / (2 · (1 - rate · E[S])) for computing times S (Pollaczek and
Khinchine). With N workers each one has a rate / N. The mean wait is then at most W if

    N ≥ rate · E[S] + rate · E[S²] / (2 · W)

The router places by load, not by chance, so it waits less than this says. Decode: as many workers as hold the
mean number of requests; with a level for the time between tokens, and once its root (the deviation of a
Poisson number).

Duties are a preference of the router. A worker with another duty finishes what it has, and nothing restarts.
But a session's next turn finds less in the memory of another worker, and answers are slower beside prompts.
So duties change seldom:

- Of E workers, E · share should prefill, a number with a fraction. One worker changes when this number is
  more than BAND away from the number that prefills. So noise of less than BAND - 1/2 around any value changes
  nothing, once the number is settled.
- After a change there is no other one for `DWELL_S`: at most 1 + T / DWELL_S changes in a time T.
- When workers come or go, the number comes within BAND at once, and some worker always answers.
- Workers have an order that is the same everywhere, and the first ones prefill. So the processes of a router,
  which see equal parts of its requests, give the same workers the same duty, but for one at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from pdserve.router.config.limits import ServiceLevel
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.eligible import Eligible
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Worker

WINDOW_S: Final = 10.0
"""Time constant of the running means of the load."""
DWELL_S: Final = 5.0
"""Shortest time between two changes of elastic workers' duties."""
LOOK_EVERY_S: Final = 0.1
"""Time between two looks at all workers of a model, for their load and their duties."""
LEAST_WEIGHT: Final = 0.1
"""That of a tenth of the window: a mean over less says little."""
UNKNOWN_BATCH: Final = 64
"""Requests of a worker that says no number."""
WAITS: Final = 3.0
"""The wait that a prompt may have is this times the mean: about nine of ten are shorter."""
LEAST_WAIT_SHARE: Final = 0.1
"""Of the level: the wait that is planned for where prompts alone take longer than the level."""
BAND: Final = 0.75
"""Of a worker. With 1 a whole number would not always be reached; half of it is what cannot be divided."""


class Load(msgspec.Struct, frozen=True):
    """What one router's requests ask of the workers."""

    prefill_ms_s: float = 0.0
    """Time to compute prompts, in ms for each second: the sum over the arriving prompts."""
    prefill_ms2_s: float = 0.0
    """The sum of the squares of these times for each second, in ms²/s. Few long prompts make it large."""
    prompts_s: float = 0.0
    """Prompts a second."""
    answering: float = 0.0
    """Requests that are being answered: now, or on average if that is more."""

    @property
    def prompt_ms(self) -> float:
        """Mean time to compute a prompt, in ms."""
        return self.prefill_ms_s / self.prompts_s if self.prompts_s else 0.0


class Demand:
    """The running means of one model's requests."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._at_s: float | None = None
        """Of the last event."""
        self._weight = 0.0
        """Of the time since the first one."""
        self._prompts_s = self._ms_s = self._ms2_s = self._answering = 0.0
        self._answering_now = 0

    def on_prompt(self, prefill_ms: float, now_s: float) -> None:
        """A prompt arrived that takes `prefill_ms` to compute."""
        self._fade(now_s)
        self._prompts_s += 1 / self._window_s
        self._ms_s += prefill_ms / self._window_s
        self._ms2_s += prefill_ms * prefill_ms / self._window_s

    def on_answering(self, requests: int, now_s: float) -> None:
        """So many requests are in the answer from now on."""
        self._fade(now_s)
        self._answering_now = requests

    def load(self, now_s: float) -> Load:
        """The means now."""
        self._fade(now_s)
        weight = max(LEAST_WEIGHT, self._weight)
        answering = max(self._answering_now, self._answering / weight)
        return Load(self._ms_s / weight, self._ms2_s / weight, self._prompts_s / weight, answering)

    def _fade(self, now_s: float) -> None:
        before_s = now_s if self._at_s is None else self._at_s
        kept = math.exp(min(0.0, before_s - now_s) / self._window_s)
        self._at_s = max(before_s, now_s)
        self._prompts_s *= kept
        self._ms_s *= kept
        self._ms2_s *= kept
        self._answering += (1 - kept) * (self._answering_now - self._answering)
        self._weight += (1 - kept) * (1 - self._weight)


class Wanted(msgspec.Struct, frozen=True):
    """Workers that the load needs, in parts of workers."""

    prefill: float = 0.0
    decode: float = 0.0

    @property
    def prefill_share(self) -> float | None:
        """Of all workers; None: no load."""
        both = self.prefill + self.decode
        return self.prefill / both if both > 0 else None

    def beyond(self, prefill: float, decode: float) -> Wanted:
        """What is left to do for others than so many workers of the two roles."""
        return Wanted(max(0.0, self.prefill - prefill), max(0.0, self.decode - decode))


def wanted(load: Load, level: ServiceLevel, max_running: int) -> Wanted:
    """The workers for `load`. `max_running`: requests that a worker computes at a time; 0: unknown."""
    return Wanted(_prefill(load, level), _decode(load, level, max_running))


def _prefill(load: Load, level: ServiceLevel) -> float:
    busy = load.prefill_ms_s / 1e3
    if not level.ttft_ms:
        return busy
    spare_ms = max(level.ttft_ms - load.prompt_ms, LEAST_WAIT_SHARE * level.ttft_ms)
    return busy + load.prefill_ms2_s / (2 * spare_ms / WAITS) / 1e3


def _decode(load: Load, level: ServiceLevel, max_running: int) -> float:
    requests = load.answering
    if level.itl_ms:
        requests += math.sqrt(requests)
    return requests / (max_running or UNKNOWN_BATCH)


class Duties:
    """The duties of one model's elastic workers: the first ones of a fixed order prefill."""

    def __init__(self, dwell_s: float) -> None:
        self._dwell_s = dwell_s
        self._quiet_until_s = -math.inf
        self._order: list[str] = []
        self._count = 0
        """How many prefill."""
        self.changes = 0
        """Workers that got the other duty, since the start."""

    @property
    def prefilling(self) -> frozenset[str]:
        """Ids of the workers that prefill. The others of those asked for decode."""
        return frozenset(self._order[: self._count])

    def update(
        self, workers: Sequence[Worker], share: float | None, *, has_decode: bool, now_s: float
    ) -> frozenset[str]:
        """The ids of those of `workers` that prefill now.

        `share`: of them that should prefill; None: as many as now. `has_decode`: other workers answer too, so
        that all of these may prefill.
        """
        before, known = self.prefilling, self._order
        self._order = [worker.id for worker in sorted(workers, key=attrgetter("rendezvous", "id"))]
        target = len(workers) * (0.5 if share is None else share)
        most = len(workers) if has_decode else max(0, len(workers) - 1)
        if self._order != known and (share is not None or len(workers) != len(known)):
            self._count = min(max(self._count, math.ceil(target - BAND)), math.floor(target + BAND))
        elif share is not None and now_s >= self._quiet_until_s:
            step = (target > self._count + BAND) - (target < self._count - BAND)
            if step and self._count + step <= most:
                self._count += step
                self._quiet_until_s = now_s + self._dwell_s
        self._count = min(self._count, most)
        prefilling = self.prefilling
        self.changes += len((before ^ prefilling) & set(known) & set(self._order))
        return prefilling


class _Model:
    """What is known of one model's load."""

    def __init__(self) -> None:
        self.demand = Demand(WINDOW_S)
        self.duties = Duties(DWELL_S)
        self.next_look_s = float("-inf")
        """When the load is measured again, and the duties follow it."""
        self.snapshot = self.narrowed = Snapshot(())
        """The last one of the fleet, and what was made of it."""
        self.narrowed_to: frozenset[str] = frozenset()


def _narrowed(snapshot: Snapshot, prefilling: frozenset[str], keeps: str) -> Snapshot:
    log = snapshot.prefill.log
    return msgspec.structs.replace(
        snapshot,
        prefill=Eligible((w for w in snapshot.prefill if w.role != "elastic" or w.id in prefilling), log),
        decode=Eligible((w for w in snapshot.decode if w.id not in prefilling or w.id == keeps), log),
        resting=tuple(w for w in snapshot.elastic if w.id in prefilling and w.id != keeps),
    )


class ElasticRoles:
    """Narrows snapshots, and says how many workers are wanted."""

    def __init__(self, weights: PlacementSettings, level: ServiceLevel, processes: int = 1) -> None:
        """`processes`: of this router; each one sees its part of the requests."""
        self._weights = weights
        self._level = level
        self._processes = processes
        self._models: dict[str, _Model] = {}

    def narrow(self, snapshot: Snapshot, now_s: float, keeps: str = "") -> Snapshot:
        """The workers for one request. Unchanged where no worker is elastic. `keeps`: id of a worker that may
        answer whatever its duty is.
        """
        if not snapshot.elastic:
            return snapshot
        model = self._model(snapshot.model)
        if snapshot is not model.snapshot or now_s >= model.next_look_s:
            prefilling = self._update(snapshot, now_s)
            model.next_look_s = now_s + LOOK_EVERY_S
            if snapshot is not model.snapshot or prefilling != model.narrowed_to:
                model.snapshot, model.narrowed_to = snapshot, prefilling
                model.narrowed = _narrowed(snapshot, prefilling, "")
        if keeps and keeps in model.narrowed_to:
            return _narrowed(snapshot, model.narrowed_to, keeps)
        return model.narrowed

    def on_planned(self, snapshot: Snapshot, uncached_tokens: int, now_s: float) -> None:
        """A request with a prompt was planned, of which `uncached_tokens` have to be computed."""
        if not self.counts(snapshot):
            return
        model = self._model(snapshot.model)
        if now_s >= model.next_look_s:  # no worker is elastic, else `narrow` has just looked
            model.next_look_s = now_s + LOOK_EVERY_S
            self._count_answering(snapshot, now_s)
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
            model = self._models[name] = _Model()
        return model

    def _update(self, snapshot: Snapshot, now_s: float) -> frozenset[str]:
        """The ids of the elastic workers that prefill."""
        left = self._beyond_fixed(snapshot, self.wanted(snapshot, now_s))
        has_decode = any(w.role == "decode" for w in snapshot.decode)
        duties = self._model(snapshot.model).duties
        return duties.update(snapshot.elastic, left.prefill_share, has_decode=has_decode, now_s=now_s)

    def _beyond_fixed(self, snapshot: Snapshot, all_: Wanted) -> Wanted:
        """What workers of fixed roles leave to others, of this process's share of them."""
        prefill = sum(w.role == "prefill" for w in snapshot.prefill)
        decode = sum(w.role == "decode" for w in (*snapshot.decode, *snapshot.direct_decode))
        return all_.beyond(prefill / self._processes, decode / self._processes)
