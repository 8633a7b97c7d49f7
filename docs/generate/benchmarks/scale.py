"""The block of docs/benchmarks/scale.md: what grows with nodes and workers."""

from __future__ import annotations

from benchmarks.scale.figure import KINDS
from benchmarks.scale.pool import WORKERS_PER_NODE
from docs.generate.benchmarks.results import NO_RUN, origin, runs
from docs.generate.markdown import table


def figures() -> str:
    """A row for each figure, a column for each size, each from the newest run that has it. Beyond its limit a
    value is bold.
    """
    kept = runs("scale")
    if not kept:
        return NO_RUN
    found = {(line["what"], line["count"]): line["value"] for run in reversed(kept) for line in run.lines}
    nodes = sorted({count for what, count in found if KINDS[what].of == "nodes"})
    rows = []
    for what, kind in KINDS.items():
        counts = [count * (1 if kind.of == "nodes" else WORKERS_PER_NODE) for count in nodes]
        values = [_shown(found[what, count], kind.limit) for count in counts]
        rows.append((kind.title, kind.unit, *values, f"{kind.limit:,.0f}: {kind.why}"))
    columns = (
        "",
        "unit",
        *(f"{size:,} nodes, {WORKERS_PER_NODE * size:,} workers" for size in nodes),
        "limit",
    )
    return "\n".join(map(origin, kept)) + "\n" + table(columns, rows)


def _shown(value: float, limit: float) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"**{text}**" if value > limit else text
