"""`pdserve prefill`, `decode`, `agg` and `elastic`: one worker, which says its role.

Every worker has the routes of both roles; the router decides which of them it uses, by the role. Only with
`handoff = "direct"` a prefill worker's SGLang differs from a decode worker's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from pdserve.engine.config import Role
from pdserve.engine.worker import Worker, WorkerConfig, WorkerRoutes
from pdserve.settings.command_line import config_command

_HELP: Final[Mapping[Role, str]] = {
    "prefill": "Run a prefill worker: SGLang plus /pd/prefill, pages published to the pool.",
    "decode": "Run a decode worker: SGLang pulling pages from the pool and writing conversations back.",
    "agg": "Run an aggregated worker: prefill and decode in one SGLang, pages shared through the pool.",
    "elastic": "Run an elastic worker: the router has it prefill or decode, as each request needs.",
}


def run(config: WorkerConfig, role: Role) -> int:
    """Serve until stopped; the exit status."""
    from pdserve.engine.launch import run_worker

    return run_worker(config, role, routes_of)


def routes_of(worker: Worker) -> WorkerRoutes:
    """The routes of both roles, and the following of every request until its pages are committed. Imports
    SGLang: only once the process is prepared for it.
    """
    from pdserve.decode.erase import Erase
    from pdserve.decode.hints import Hints
    from pdserve.decode.keeping import Keeping
    from pdserve.decode.lookup import Lookup
    from pdserve.decode.pull_ahead import PullAhead
    from pdserve.decode.session_pages import SessionPages
    from pdserve.decode.settle import WriteBack
    from pdserve.engine.commits import Commits
    from pdserve.prefill.missed_pages import MissedPages
    from pdserve.prefill.routes import Prefill

    config, engine, pool, names = worker.config, worker.engine, worker.pool, worker.names
    missed, commits = MissedPages(pool, worker.metrics), Commits(pool, config.commit_timeout_s)
    sessions = SessionPages(names)
    write_back = WriteBack(
        commits,
        missed,
        names=names,
        timeout_s=config.commit_timeout_s,
        keeping=Keeping(pool),
        sessions=sessions,
    )
    prefill = Prefill(
        engine,
        names=names,
        commits=commits,
        missed=missed,
        metrics=worker.metrics,
        hands_over=worker.is_prefill_sender,
    )
    pull_ahead = PullAhead(engine, pool, names=names, step_tokens=config.pull_step_tokens)
    lookup = Lookup(engine, pool, names=names)
    hints = Hints(engine, pool, lookup, names=names)
    routes = (prefill, write_back, pull_ahead, lookup, hints, Erase(engine, pool, lookup, sessions))
    return WorkerRoutes([one.router() for one in routes], write_back.follow, write_back.unsettled)


prefill, decode, agg, elastic = (
    config_command(
        WorkerConfig, functools.partial(run, role=role), help=says, extra_args_key="engine.extra_args"
    )
    for role, says in _HELP.items()
)
