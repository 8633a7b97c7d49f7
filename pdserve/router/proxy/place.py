"""The plan of a request, from the fleet as it is now; where there is no worker, that of the next one that
comes.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from pdserve.router.api.errors import NoWorkerError
from pdserve.router.placement.planner import Plan
from pdserve.router.proxy.parts import Parts
from pdserve.router.request.request import Request
from pdserve.router.sessions.keys import SessionKey
from pdserve.router.sessions.table import SessionEntry


async def last_turn(parts: Parts, session: SessionKey) -> SessionEntry | None:
    """The session's last turn, as this router or those that share the table with it know it. Of the same turn
    the own table knows more.
    """
    last = parts.placer.sessions.get(session, parts.loop.time())
    found = None if parts.shared is None else await parts.shared.get(session)
    return found if found is not None and (last is None or found.is_after(last)) else last


def plan(parts: Parts, request: Request, last: SessionEntry | None, lost: Container[str] = ()) -> Plan:
    """The plan of a request. `lost`: workers of the direct way that failed it. Raises NoWorkerError."""
    now_s, stats = parts.loop.time(), parts.stats
    snapshot = parts.fleet.snapshot(request.model, now_s)
    if lost:
        made = parts.placer.plan(request.facts, snapshot.without(lost), last, now_s, "pool")
        made = msgspec.structs.replace(made, settle=None)  # that wait is over
    else:
        made = parts.placer.plan(request.facts, snapshot, last, now_s)
    for cause in made.causes:
        if cause in stats.placements:
            stats.placements[cause] += 1
        else:
            stats.on_placed(*cause)
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
            return plan(parts, request, last)
        except NoWorkerError:
            if has_worker() or not await parts.wait.until(has_worker, end_s):
                raise
