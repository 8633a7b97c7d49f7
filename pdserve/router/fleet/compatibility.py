"""Whether workers fit together. Pure.

Workers of one model exchange KV pages, so a page must mean the same at each of them. A worker whose pages
differ is refused when it joins. It is compared again when it, or another worker, has changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from pdserve.router.fleet.worker import BOTH, Worker, WorkerInfo


def find_mismatch(worker: Worker, others: Iterable[Worker]) -> str | None:
    """Why `worker` cannot serve beside those of `others` that have joined: one line, or None if it can.

    Workers with another tokenizer or chat template make other tokens of a prompt, so they would not find
    each other's pages. A worker that no longer answers, or drains, keeps no other worker out: it is compared
    again when it comes back.
    """
    info = worker.info
    if info is None:
        return None
    if info.role not in (worker.role, *BOTH):
        return f"worker {worker.id} is listed under '{worker.role}' but says its role is '{info.role}'"
    for other in others:
        is_away = other.stopping or (other.probe_failures and not other.ready)
        if other is worker or other.info is None or other.refused or is_away:
            continue
        field = _differing_field(info, other.info)
        if field is not None:
            name, mine, theirs = field
            return (
                f"{worker.role} worker {worker.id} and {other.role} worker {other.id} differ in {name} "
                f"({mine!r} and {theirs!r}) and cannot share KV pages; give them the same settings and files"
            )
    return None


def joining_order(found: Sequence[tuple[Worker, WorkerInfo]], refused: Container[str]) -> list[Worker]:
    """The order in which workers join that were found together. The first worker decides which others fit,
    and which worker answered first is chance. So the workers whose ids are not in `refused` come first, then
    those that fit most of the workers found, then the order given counts.
    """
    fitting = {
        worker.id: sum(_differing_field(info, theirs) is None for _, theirs in found)
        for worker, info in found
    }
    workers = [worker for worker, _ in found]
    return sorted(workers, key=lambda worker: (worker.id in refused, -fitting[worker.id]))


def _differing_field(mine: WorkerInfo, theirs: WorkerInfo) -> tuple[str, Any, Any] | None:
    if mine.model != theirs.model and mine.namespace != theirs.namespace:
        return None
    for name in ("model", "engine", "tasks", "page_size"):
        if getattr(mine, name) != getattr(theirs, name):
            return name, getattr(mine, name), getattr(theirs, name)
    for key in sorted(mine.kv_geometry.keys() | theirs.kv_geometry.keys()):
        if mine.kv_geometry.get(key) != theirs.kv_geometry.get(key):
            return f"kv_geometry.{key}", mine.kv_geometry.get(key), theirs.kv_geometry.get(key)
    if mine.namespace != theirs.namespace:
        return "namespace", mine.namespace, theirs.namespace
    for name in ("tokenizer", "chat_template"):
        ours, others = getattr(mine, name), getattr(theirs, name)
        if ours and others and ours != others:
            return name.replace("_", " "), ours, others
    return None
