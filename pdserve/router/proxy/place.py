"""The plan of a request, from the fleet as it is now; where there is no worker, that of the next one that
comes.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from pdserve.router.api.errors import NoWorkerError
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.placement.planner import Plan
from pdserve.router.proxy.parts import Parts
from pdserve.router.request.request import Request
from pdserve.router.sessions.table import SessionEntry, digest


def last_turn(parts: Parts, request: Request, now_s: float) -> SessionEntry | None:
    """The last turn of the request's session; of a session that another one began, that one's."""
    facts, session = request.facts, request.facts.session
    if session is None:
        return None
    last = parts.placer.sessions.get(session, now_s)
    if facts.is_final:  # no request of the session follows; others may use its first tokens
        request.lines += b"x-pdserve-final: %d\r\n" % (0 if last is None else last.shared_tokens)
    if session.is_named:  # so that its pages can be erased
        turn = 1 if last is None else last.turns + 1
        request.lines += b"x-pdserve-session: %b %d\r\n" % (digest(session.name).encode(), turn)
    if last is None and session.parent:
        last = parts.placer.parents_turn(facts, now_s)
    return last


def plan(
    parts: Parts,
    request: Request,
    last: SessionEntry | None,
    now_s: float,
    lost: Container[str] = (),
    snapshot: Snapshot | None = None,
) -> Plan:
    """The plan of a request. `lost`: workers of the direct way that failed it. `snapshot`: the workers of its
    model now, where they are known. Raises NoWorkerError.
    """
    if snapshot is None:
        snapshot = parts.fleet.snapshot(request.model, now_s)
    if lost:
        made = parts.placer.plan(request.facts, snapshot.without(lost), last, now_s, "pool")
        made = msgspec.structs.replace(made, settle=None)  # that wait is over
    else:
        made = parts.placer.plan(request.facts, snapshot, last, now_s)
    parts.plans[made.causes] += 1
    request.plan = made
    request.words += made.reasons
    return made


async def first_plan(parts: Parts, request: Request, last: SessionEntry | None) -> Plan:
    """As `plan`; if the last worker has gone since the request was let in, that of the next one that comes.
    Raises NoWorkerError.
    """
    end_s = parts.loop.time() + parts.limits_s.wait_for_worker_s - request.outage_s

    def has_worker() -> bool | None:
        snapshot = parts.fleet.snapshot(request.model, parts.loop.time())
        return bool(snapshot.decode or snapshot.direct_decode) or None

    while True:
        try:
            return plan(parts, request, last, parts.loop.time())
        except NoWorkerError:
            if has_worker() or not await parts.wait.until(has_worker, end_s):
                raise
