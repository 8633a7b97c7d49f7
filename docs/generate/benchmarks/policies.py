"""The block of docs/benchmarks/policies.md: hit rates of the eviction policies."""

from __future__ import annotations

from docs.generate.benchmarks.results import NO_RUN, origin, runs
from docs.generate.markdown import table


def hit_rates() -> str:
    """The newest run: blocks hit by prefix in percent, the best policy of a row in bold."""
    kept = runs("policies")
    if not kept:
        return NO_RUN
    run = kept[0]
    names = list(dict.fromkeys(row["policy"] for row in run.lines))
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in run.lines:
        found.setdefault((row["trace"], row["capacity_blocks"]), {})[row["policy"]] = row["hit_rate"]
    rows = []
    for (trace, capacity), rates in found.items():
        best = max(rates.values())
        shown = [f"{100 * rates[name]:.1f}" for name in names]
        bold = [
            f"**{text}**" if rates[name] == best else text for name, text in zip(names, shown, strict=True)
        ]
        rows.append((trace, f"{capacity:,}", *bold))
    return origin(run) + "\n" + table(("trace", "blocks held", *names), rows)
