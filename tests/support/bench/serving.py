"""Scripted servers that run beside a test, records of asks made by hand, and plans of contenders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving.contenders import Contender
from benchmarks.serving.load.records import Record, Run
from pdserve.settings.toml_text import to_toml
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import read_cluster_file
from pdserve.up.plan import Plan, make_plan
from tests.support.bench.scripted import ScriptedServer


@contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """The server in a thread of its own: the client has an event loop to itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def checked_plan(chosen: Contender, directory: Path) -> Plan:
    """What is started for a contender: every process takes its configuration."""
    file = directory / "cluster.toml"
    file.write_text(to_toml(chosen.tables))
    plan = make_plan(
        read_cluster_file(file, {}, {}),
        program=("pdserve",),
        run_dir=Path("/run/b"),
        uid=0,
        ports=iter(range(20_000, 20_010)),
        cluster_token="secret",
    )
    check_tables(plan, str(file), SCHEMAS)
    return plan


def record(turn: int, first_s: float | None, **more: Any) -> Record:
    """One ask of 100 tokens, answered with 10 within 2 s."""
    given = {"session": 0, "planned_s": 0.0, "due_s": 0.0, "sent_s": 0.0, "done_s": 2.0}
    tokens = {"prompt_tokens": 100, "output_tokens": 10}
    return Record(turn=turn, first_s=first_s, **{**given, **tokens, **more})


def run(*records: Record, **more: Any) -> Run:
    """These asks as a run of 2 s."""
    given = {"model": "m", "wall_s": 2.0, "client_cpu": 0.1, "lags_s": [0.0], "open_loop": False}
    return Run(records=list(records), **{**given, **more})
