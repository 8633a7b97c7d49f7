"""The plan of one request: a pure function of the request, the fleet and the session's last turn.

Rules, in order:
1. The model decides which workers count: unknown 404, none given and several served 400.
2. A decode (or aggregated) worker is chosen by the decode policy. None eligible: 503.
3. A prefill worker is chosen by the prefill policy, unless the endpoint has no prefill stage, the prompt
is estimated
   shorter than `min_prefill_tokens`, or none is eligible: then the decode worker does it alone.
4. If the session had a turn before and its pages are needed by someone other than the worker that has them
(a prefill
   stage, another decode worker), that worker is asked first whether they are settled in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pdserve.errors import RequestError
from pdserve.router.fleet import Snapshot, Worker
from pdserve.router.policies.base import Policy
from pdserve.router.schema import Facts
from pdserve.router.sessions import SessionEntry

RETRY_AFTER_S = 1
"""Said to clients with a 503: workers are probed every second or so."""
DEFAULT_MODEL = "default"
"""SGLang's own name for whatever it serves; its documentation's examples send it."""


class NoWorkerError(RequestError):
    """No worker is eligible for the request now (503, `Retry-After`)."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, type_="service_unavailable_error", code="no_healthy_worker")


class Settle(msgspec.Struct, frozen=True, gc=False):
    """Ask `worker` whether the pages of `request_id` are committed, and wait for it, bounded."""

    worker: Worker
    request_id: str


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Who does what for one request."""

    decode: Worker
    prefill: Worker | None = None
    settle: Settle | None = None
    candidates: tuple[Worker, ...] = ()
    """All workers that `decode` was chosen from; the others are its alternates."""
    reasons: tuple[str, ...] = ()
    """Words for the log line and the `x-pdserve-plan` header."""


class Planner(msgspec.Struct, frozen=True):
    """The settings that a plan depends on."""

    prefill_policy: Policy
    decode_policy: Policy
    prefill_endpoints: frozenset[str]
    min_prefill_tokens: int = 0

    def plan(self, facts: Facts, snapshot: Snapshot, last: SessionEntry | None) -> Plan:
        """The plan of one request. Raises NoWorkerError."""
        if not snapshot.decode:
            raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
        last_id = None if last is None else last.decode_id
        decode, why_decode = self.decode_policy.choose(facts, snapshot.decode, last_id)
        prefill, why_prefill = self._choose_prefill(facts, snapshot, decode)
        settle = None
        if last is not None and (prefill is not None or decode.id != last.decode_id):
            there = (*snapshot.decode, *snapshot.draining)
            holder = next((w for w in there if w.id == last.decode_id), None)
            if holder is not None:
                settle = Settle(holder, last.request_id)
        return Plan(
            decode, prefill, settle, snapshot.decode, (f"decode={why_decode}", f"prefill={why_prefill}")
        )

    def _choose_prefill(self, facts: Facts, snapshot: Snapshot, decode: Worker) -> tuple[Worker | None, str]:
        if decode.role == "agg":
            return None, "agg"
        if facts.endpoint not in self.prefill_endpoints:
            return None, "no-stage"
        if facts.prompt_tokens_estimate < self.min_prefill_tokens:
            return None, "short-prompt"
        if not snapshot.prefill:
            return None, "none-ready"
        return self.prefill_policy.choose(facts, snapshot.prefill, None)


def resolve_model(requested: str | None, served: Sequence[str]) -> str:
    """The served model that a request means; `BASE:ADAPTER` names a LoRA adapter of BASE, as in SGLang.

    Raises NoWorkerError while nothing is known to be served, RequestError 404 for a model that is not, and
    400 when none is named and the choice is not unique.
    """
    if requested in served:
        return requested  # type: ignore[return-value]  # `in` a sequence of str
    if not served:
        raise NoWorkerError("No worker has joined yet; try again shortly.")
    if requested is None or requested in ("", DEFAULT_MODEL):
        if len(served) == 1:
            return served[0]
        names = ", ".join(repr(name) for name in served)
        raise RequestError(400, f"'model' is missing; this server serves {names}.", param="model")
    base = requested.partition(":")[0]
    if base in served:
        return base
    names = ", ".join(repr(name) for name in served)
    raise RequestError(
        404,
        f"The model {requested[:200]!r} does not exist; this server serves {names}.",
        code="model_not_found",
        param="model",
    )


def choose_alternate(candidates: Iterable[Worker], tried: Iterable[str]) -> Worker | None:
    """The least loaded of the candidates that were not tried, for a request whose worker failed."""
    tried = set(tried)
    return min((w for w in candidates if w.id not in tried), key=lambda w: w.in_flight, default=None)
