"""A picture of a comparison: first token and cached share by turn, a line a contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.lib.figures import Turn

SIZE_INCHES: Final = (9.0, 3.4)
COLORS: Final = ("#777777", "#c9862b", "#7a5ea8", "#2b6cb0", "#2f855a", "#b03060")


def draw_turns(turns: Mapping[str, Sequence[Turn]], title: str, path: Path, restarted: bool = False) -> None:
    """`restarted`: before the last turn; `path` is an SVG or PNG file. Raises OSError."""
    figure = Figure(SIZE_INCHES, layout="constrained")
    first, cached = figure.subplots(1, 2)
    for color, (name, its) in zip(COLORS * len(turns), turns.items(), strict=False):
        numbers = range(1, len(its) + 1)
        look = {"label": name, "color": color, "marker": "o", "markersize": 3.5, "linewidth": 1.6}
        first.plot(numbers, [one.first_token_ms for one in its], **look)
        cached.plot(numbers, [100 * (one.cached_share or 0.0) for one in its], **look)
    best = [100 * (one.reusable_share or 0.0) for one in next(iter(turns.values()))]
    cached.plot(range(1, len(best) + 1), best, color="#bbbbbb", linestyle=":", label="could be")
    first.set_ylim(bottom=0)
    cached.set_ylim(-3, 103)
    for axes, text in ((first, "first token, ms"), (cached, "prompt tokens found cached, %")):
        axes.set_xlabel("turn; all processes restarted before the last" if restarted else "turn")
        if restarted:
            axes.axvline(len(best) - 0.5, color="#999999", linestyle="--", linewidth=1)
        axes.set_title(text, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    cached.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
