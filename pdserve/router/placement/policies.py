"""Placement policies: a pure choice among eligible workers, with the reason.

A policy gets at least one worker, in a fixed order, and returns one of them. It uses no lock, clock or random
source: randomness (`Ask.draw`) and times are part of its argument. Policies of other packages are found by
name through the entry point group `pdserve.router.policies`. Such an entry point is called with
`PolicySettings` and returns a `Policy`:

    [project.entry-points."pdserve.router.policies"]
    nearest = "my_package.nearest:Nearest"

The cost function. One number in milliseconds for a request at a worker; lower is better:

    cost_ms = prefill_ms_per_token    * (queued tokens + uncached tokens)
            + host_ms_per_token       * tokens in the worker's host memory
            + pool_ms_per_token       * tokens in the pool
            + running_ms_per_request  * requests at the worker
            + missing_kv_ms_per_token * tokens for which the worker has no free KV memory

It is roughly the time to the first token, plus the delay of other requests at the worker. Tokens in device
memory cost nothing. The weights are in the configuration (`[placement]`); good ones come from measurements:
the prefill rate of the GPU, and the bytes of KV per token divided by the pool's bandwidth.

Affinity. The worker of the session's last turn, else rendezvous (highest random weight) hashing: every
router scores each worker by a hash of session and worker and takes the best score. So replicas agree without
shared state, also after a restart, and a worker that leaves moves only its own sessions (Thaler &
Ravishankar, 1998). In mode soft its load is bounded: a worker is overloaded if it has more than
`overload_factor` times the mean of requests, and more than `overload_min_requests`; then the next best score
counts. At least one worker is at or below the mean, so one is always found (Mirrokni, Thorup & Zadimoghaddam,
2016). Mode hard ignores load.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Final, Protocol

import msgspec
import xxhash
from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.fleet.eligible import Eligible, Key
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import NOTHING, Cached, Places
from pdserve.settings.plugins import installed, load


def cost_ms(weights: PlacementSettings, worker: Worker, prompt_tokens: int, cached: Cached) -> float:
    """The cost in ms of `prompt_tokens` at `worker`."""
    uncached = max(0.0, prompt_tokens - cached.device - cached.host - cached.pool)
    cost = weights.prefill_ms_per_token * (worker.queued_tokens + uncached)
    cost += weights.host_ms_per_token * cached.host + weights.pool_ms_per_token * cached.pool
    cost += weights.running_ms_per_request * (worker.in_flight + worker.elsewhere)
    if worker.free_kv_tokens is not None:
        missing = prompt_tokens - cached.device - worker.free_kv_tokens
        cost += weights.missing_kv_ms_per_token * max(0.0, missing)
    return cost


def cost_words(total_ms: float, worker: Worker, prompt_tokens: int, cached: Cached) -> str:
    """The cost and its parts as text, for the log line and the response header."""
    uncached = max(0, int(prompt_tokens - cached.total))
    return f"{total_ms:.1f}ms uncached={uncached} queued={worker.queued_tokens} requests={worker.load}"


class Ask(msgspec.Struct, frozen=True, gc=False):
    """The facts of a request that a policy may use."""

    prompt_tokens: int = 0
    """Estimated number of tokens."""
    session: str | None = None
    """The session's name, equal at every router. None: the request has no session."""
    last_id: str | None = None
    """The worker of the session's last turn, if known."""
    turn: int = 0
    """Number of the request at this router. Policies use it to alternate between equal workers."""
    draw: int = 0
    """A random number of 32 bits."""
    places: Places | None = None
    """Estimated places of the prompt's prefix. None: unknown, or no policy uses them."""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """A worker, and the reason as a word and figures for the log line and `x-pdserve-plan`."""

    worker: Worker
    reason: str
    figures: str = ""
    cause: str = ""
    """A more precise reason for metrics, from a small set of words. Empty: `reason` is used."""

    def __str__(self) -> str:
        return f"{self.reason}({self.figures})" if self.figures else self.reason


class Policy(Protocol):
    """Chooses one of the eligible workers."""

    needs_places: bool
    """Whether the policy uses `Ask.places`, which costs some microseconds to make."""

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """One of `workers` (never empty). Raises NoWorkerError if none of them may be used."""
        ...


class PolicySettings(msgspec.Struct, frozen=True):
    """The settings that an entry point gets to make a policy."""

    stickiness: Session = Session()
    weights: PlacementSettings = PlacementSettings()


FEW: Final = 8
"""So many workers are sooner walked through than kept in order by load."""
FEW_COSTS: Final = 4
"""The same by cost."""
LEAST_FLOOR_MS: Final = 1e-9
MISS_SHARE: Final = 0.25
"""Of a prompt: the least that makes a worker preferred for what it has of it."""
_load: Final = attrgetter("load")


class LeastLoaded:
    """Counts this router's requests, and those of other routers as far as workers report them."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The least loaded worker. Equal ones take turns, all of them: were the search begun at worker
        `turn`, the one behind a busy worker would get the requests of both.
        """
        if len(workers) == 1:
            return Choice(workers[0], "least-loaded")
        if len(workers) > FEW:
            return Choice(workers.order(_load).least(ask.turn), "least-loaded")
        loads = [worker.load for worker in workers]
        least = min(loads)
        place = loads.index(least)
        for _ in range(ask.turn % loads.count(least)):
            place = loads.index(least, place + 1)
        return Choice(workers[place], "least-loaded")


class RoundRobin:
    """Sends request n to worker n mod count."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The worker at index `ask.turn` mod count."""
        return Choice(workers[ask.turn % len(workers)], "round-robin")


class CacheAware:
    """Takes the lowest cost: estimated cached tokens of the prompt against load.

    What a worker has of the prompt itself does not count while it is overloaded: else all who ask about one
    document would wait at one worker. Nor does less than `MISS_SHARE` of the prompt: else all who begin with
    one system prompt would go where it was computed first, and the other workers would never have it.
    """

    needs_places = True
    reason = "cache-aware"

    def __init__(self, settings: PolicySettings) -> None:
        self._weights = weights = settings.weights
        self._stickiness = settings.stickiness

        def waiting_ms(worker: Worker) -> float:
            """The part of a worker's cost that does not depend on the request."""
            waiting = weights.prefill_ms_per_token * worker.queued_tokens
            return waiting + weights.running_ms_per_request * worker.load

        self._waiting_ms = waiting_ms

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The worker with the lowest cost. Equal workers alternate."""
        limit = math.inf if ask.places is None else load_limit(self._stickiness, workers, self._waiting_ms)
        least_ms, best = math.inf, list[tuple[Worker, Cached]]()
        for floor_ms, worker in self._candidates(ask, workers):
            if floor_ms and floor_ms >= least_ms:
                break
            cached = self._cached_by_all(ask) if worker.load >= limit else self._cached(ask, worker)
            total_ms = cost_ms(self._weights, worker, ask.prompt_tokens, cached)
            if total_ms < least_ms:
                least_ms, best = total_ms, [(worker, cached)]
            elif total_ms == least_ms:
                best.append((worker, cached))
        worker, cached = best[ask.turn % len(best)]
        cause = "" if cached is NOTHING else "prefix"
        return Choice(worker, self.reason, cost_words(least_ms, worker, ask.prompt_tokens, cached), cause)

    def _candidates(self, ask: Ask, workers: Eligible) -> Iterator[tuple[float, Worker]]:
        """(what it costs at least, worker); 0: all of these must be looked at. Then no later one costs less
        than what an earlier one costs at least.
        """
        if len(workers) <= FEW_COSTS:
            for worker in workers:
                yield 0.0, worker
            return
        if ask.places is not None:
            for incarnation in ask.places.incarnations:
                if (knowing := workers.by_incarnation.get(incarnation)) is not None:
                    yield 0.0, knowing
        # all others find the same: what the pool has
        found = self._cached_by_all(ask)
        missing = max(0.0, ask.prompt_tokens - found.pool)
        floor_ms = self._weights.prefill_ms_per_token * missing + self._weights.pool_ms_per_token * found.pool
        for waiting_ms, worker in workers.order(self._waiting_ms).ascending(ask.turn):
            yield max(floor_ms + waiting_ms, LEAST_FLOOR_MS), worker

    def _cached_by_all(self, ask: Ask) -> Cached:
        return NOTHING if ask.places is None else ask.places.in_pool

    def _cached(self, ask: Ask, worker: Worker) -> Cached:
        if ask.places is None:
            return NOTHING
        found = ask.places.cached(worker)
        is_hit = found.device + found.host >= MISS_SHARE * ask.prompt_tokens
        return found if is_hit else ask.places.in_pool


class LoadAware(CacheAware):
    """Takes the lowest cost without caches: queued tokens, requests and free KV memory."""

    needs_places = False
    reason = "load-aware"

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The worker with the lowest cost. Equal workers alternate."""
        return super().choose(ask if ask.places is None else replace(ask, places=None), workers)


class PowerOfTwo:
    """Takes the less loaded of two workers drawn at random, so several routers do not all choose the same.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        self._weights = settings.weights

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The better of two different workers. Every pair, and each worker of it, is equally likely."""
        count = len(workers)
        first = ask.draw % count
        second = (first + 1 + ask.draw // count % max(1, count - 1)) % count
        costs = [
            (cost_ms(self._weights, workers[at], ask.prompt_tokens, NOTHING), at) for at in (first, second)
        ]
        total_ms, at = min(costs, key=itemgetter(0))
        worker = workers[at]
        return Choice(worker, "power-of-two", cost_words(total_ms, worker, ask.prompt_tokens, NOTHING))


class Affinity:
    """Sends a session to one worker. `fallback` places requests without a session."""

    def __init__(self, stickiness: Session, fallback: Policy) -> None:
        self._stickiness = stickiness
        self._fallback = fallback
        self.needs_places = fallback.needs_places

    def choose(self, ask: Ask, workers: Eligible) -> Choice:
        """The session's worker, or another one if it is gone or overloaded.

        Raises NoWorkerError if the session's worker is gone and `when_gone` is refuse.
        """
        if ask.session is None:
            return self._fallback.choose(ask, workers)
        why, last = "rendezvous", None if ask.last_id is None else workers.by_id.get(ask.last_id)
        if last is not None and last.load < self._stickiness.overload_min_requests:
            return Choice(last, "session")
        limit = math.inf if self._stickiness.mode == "hard" else load_limit(self._stickiness, workers, _load)
        if ask.last_id is not None:
            if last is not None and last.load < limit:
                return Choice(last, "session")
            if last is not None:
                why = "overloaded"
            elif self._stickiness.when_gone == "refuse":
                raise NoWorkerError("The worker of this session is gone; try again shortly.")
            else:
                why = "gone"
        scores = rendezvous_scores(ask.session, workers)
        best = workers[scores.index(max(scores))]
        if best.load >= limit:
            best = next((w for w in rendezvous_order(ask.session, workers) if w.load < limit), best)
        return Choice(best, why)


def load_limit(stickiness: Session, workers: Eligible, kept: Key) -> float:
    """Number of requests from which on a worker is overloaded. The mean includes the new request. `kept`: the
    key of an order that is kept of the workers anyway.
    """
    count = len(workers)
    if count > FEW:
        mean = workers.order(kept).mean_load + 1 / count
    else:
        mean = (sum(map(_load, workers)) + 1) / count
    return max(stickiness.overload_factor * mean, stickiness.overload_min_requests)


def rendezvous_scores(session: str, workers: Eligible) -> list[int]:
    """The workers' scores for the session: the products, modulo 2^64, of its hash with odd numbers that are
    the workers'. For a hash of 64 random bits each worker is the best one as often as every other.
    """
    hashed = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))
    products = map(hashed.__mul__, workers.rendezvous)
    return list(map(_64_BITS.__and__, products))  # no bytecode for each worker


_64_BITS: Final = 2**64 - 1


def rendezvous_order(session: str, workers: Eligible) -> list[Worker]:
    """`workers` by their score for the session, best first. The input order does not matter."""
    scored = zip(rendezvous_scores(session, workers), workers, strict=True)
    return [worker for _, worker in sorted(scored, key=lambda one: (one[0], one[1].id), reverse=True)]


GROUP: Final = "pdserve.router.policies"
AFFINITY: Final = "affinity"
_BUILT_IN: Final[dict[str, Callable[[PolicySettings], Policy]]] = {
    "cache_aware": CacheAware,
    "least_loaded": LeastLoaded,
    "load_aware": LoadAware,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
POLICY_NAMES: Final = (AFFINITY, *_BUILT_IN)


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """The policy called `name`. Raises ConfigError that suggests a similar name."""
    if name == AFFINITY:
        without_key = settings.stickiness.without_key
        if without_key == AFFINITY:
            raise ConfigError("'without_key' is for requests without a session; it cannot be 'affinity'")
        return Affinity(settings.stickiness, make_policy(without_key, settings))
    if name in _BUILT_IN:
        return _BUILT_IN[name](settings)
    if name not in (added := installed(GROUP)):
        known = (*POLICY_NAMES, *sorted(added))
        near = difflib.get_close_matches(name, known, n=1) or known[:1]
        raise ConfigError(f"unknown policy {name!r}; did you mean {near[0]!r}? ({', '.join(known)})")
    made: Policy = load(GROUP, name, "prefill_policy or decode_policy", "policy")(settings)
    return made
