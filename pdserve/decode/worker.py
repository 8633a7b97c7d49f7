"""The decode, aggregated and elastic roles: their routes on SGLang's app."""

from __future__ import annotations

from pdserve.decode.hints import Hints
from pdserve.decode.keeping import Keeping
from pdserve.decode.lookup import Lookup
from pdserve.decode.pull_ahead import PullAhead
from pdserve.decode.routes import Settled
from pdserve.decode.writeback import WriteBack
from pdserve.engine.worker import RoleParts, Worker
from pdserve.prefill import worker as prefill
from pdserve.prefill.missed_pages import MissedPages


def parts(worker: Worker) -> RoleParts:
    """`/pd/settled`, `/pd/pull`, `/pd/keep`, `/v1/kv/lookup` and hints, and the following of every request
    until its pages are committed.
    """
    keeping = Keeping(worker.pool)
    write_back = WriteBack(
        worker.pool,
        MissedPages(worker.pool, worker.metrics),
        names=worker.names,
        timeout_s=worker.config.settle_timeout_s,
        limit=worker.config.followed_requests,
        keeping=keeping,
    )
    pull_ahead = PullAhead(
        worker.engine, worker.pool, names=worker.names, step_tokens=worker.config.pull_step_tokens
    )
    lookup = Lookup(worker.engine, worker.pool, names=worker.names)
    hints = Hints(worker.engine, worker.pool, lookup, names=worker.names)
    routes = (Settled(write_back), pull_ahead, keeping, lookup, hints)
    return RoleParts([one.router() for one in routes], write_back.follow, write_back.unsettled)


def aggregated_parts(worker: Worker) -> RoleParts:
    """An aggregated or elastic worker serves both roles."""
    own = parts(worker)
    return RoleParts([*own.routers, *prefill.parts(worker).routers], own.on_start, own.unpublished)
