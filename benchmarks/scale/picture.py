"""The figures as charts: one panel for each, with its limit where that is near."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plot import picture
from benchmarks.scale.figure import KINDS, Figure

COLUMNS = 4


def plot_scale(path: Path, figures: Sequence[Figure], title: str) -> None:
    """A PNG. Raises BenchError."""
    kinds = [what for what in KINDS if any(one.what == what for one in figures)]
    rows = -(-len(kinds) // COLUMNS)
    with picture(path, rows, COLUMNS, title, figsize=(4 * COLUMNS, 1 + 2.8 * rows)) as axes:
        for what, axis in zip(kinds, axes.flat, strict=False):
            kind = KINDS[what]
            mine = sorted((one.count, one.value) for one in figures if one.what == what)
            axis.plot(*zip(*mine, strict=True), marker="o", color="#1f5fa8")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(kind.title, loc="left", fontsize=10)
            axis.set_xlabel(kind.of, fontsize=8)
            axis.set_ylabel(kind.unit, fontsize=8)
            low, high = mine[0][1], max(value for _, value in mine)
            if kind.limit <= 20 * high:
                axis.axhline(kind.limit, color="#b04a4a", linestyle="--", linewidth=1)
                axis.text(mine[0][0], kind.limit, kind.why, color="#b04a4a", fontsize=7, va="bottom")
            axis.set_ylim(low / 2, 3 * max(high, kind.limit if kind.limit <= 20 * high else 0))
        for axis in list(axes.flat)[len(kinds) :]:
            axis.set_visible(False)
