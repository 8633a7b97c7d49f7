"""A fit in lines for people: one for each worker, the table of host memory, the notes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.capacity.facts import Fit, Note, WorkerFit
from pdserve.capacity.gpus import near
from pdserve.capacity.memory import GB, MIB, rounded


def assignment(fit: Fit, worker: WorkerFit) -> str:
    """Which GPUs, and what lies there."""
    nodes, nics = near(fit.machine, worker.gpus)
    name = next(gpu.name for gpu in fit.machine.gpus if gpu.index in worker.gpus)
    one = "s" if len(worker.gpus) > 1 else ""
    where = f", NUMA node{'s' * (len(nodes) > 1)} {_list(sorted(nodes))}" if nodes else ""
    there = f", near {_list([nic.name for nic in nics])}" if nics else ""
    return (
        f"{worker.name}: GPU{one} {_list(worker.gpus)} ({name}{where}{there}), KV for about "
        f"{rounded(worker.device_tokens):,} tokens, pages of {worker.page_size} tokens and "
        f"{worker.page_bytes / MIB:.2f} MiB a rank{_drafts(worker)}, at most "
        f"{worker.start_timeout_s:.0f} s to start"
    )


def _drafts(worker: WorkerFit) -> str:
    """What drafts tokens, and where its keys and values are."""
    if not worker.draft:
        return ""
    if not worker.draft_page_bytes:
        return f" with those of {worker.draft}"
    return f" and {worker.draft_page_bytes / MIB:.2f} MiB of {worker.draft}"


def memory_table(fit: Fit) -> list[str]:
    """Host memory, in 10^9 bytes."""
    rows = [("", "ranks", "GB each", "GB")]
    rows += [
        (
            f"{one.name} host pool",
            str(one.ranks),
            f"{one.host_bytes / GB:,.0f}",
            _gb(one.host_bytes * one.ranks),
        )
        for one in fit.workers
    ]
    rows += [(f"{one.name} arena", "", "", _gb(one.capacity_bytes)) for one in fit.pools]
    rows += [("kept for the system", "", "", _gb(fit.reserve_bytes))]
    taken = sum(one.host_bytes * one.ranks for one in fit.workers)
    taken += sum(one.capacity_bytes for one in fit.pools) + fit.reserve_bytes
    rows += [("free", "", "", _gb(fit.machine.memory_bytes - taken))]
    rows += [("host memory", "", "", _gb(fit.machine.memory_bytes))]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]) for row in rows
    ]


def note_lines(notes: Sequence[Note]) -> list[str]:
    """One line each."""
    marks = {"ok": "", "warn": "warning: ", "fail": "error: "}
    return [f"{marks[note.level]}{note}" for note in notes]


def lines(fit: Fit) -> list[str]:
    """All of it."""
    return [*(assignment(fit, one) for one in fit.workers), *memory_table(fit), *note_lines(fit.notes)]


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:,.0f}"


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
