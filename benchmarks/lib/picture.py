"""A picture of a comparison: first token and cached share by turn, a line a contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.lib.figures import Figures, Measured

SIZE_INCHES: Final = (9.0, 3.4)
COLORS: Final = ("#777777", "#c9862b", "#7a5ea8", "#2b6cb0", "#2f855a", "#b03060")


def draw_turns(found: Sequence[Measured], title: str, path: Path) -> None:
    """Medians over the rounds, of the first load and size; `path` is an SVG or PNG file. Raises OSError."""
    of_one = [one for one in found if (one.load, one.size) == (found[0].load, found[0].size)]
    by_name: dict[str, list[Measured]] = {}
    for one in of_one:
        by_name.setdefault(one.contender, []).append(one)
    figure = Figure(SIZE_INCHES, layout="constrained")
    first, cached = figure.subplots(1, 2)
    for color, (name, rounds) in zip(COLORS * len(by_name), by_name.items(), strict=False):
        turns = list(zip(*(one.outcome.turns for one in rounds), strict=False))
        numbers = range(1, len(turns) + 1)
        look = {"label": name, "color": color, "marker": "o", "markersize": 3.5, "linewidth": 1.6}
        first.plot(numbers, [_first_token_ms(turn) for turn in turns], **look)
        cached.plot(numbers, [100 * median(one.cached_share for one in turn) for turn in turns], **look)
    best = [100 * figures.reusable_share for figures in of_one[0].outcome.turns]
    cached.plot(range(1, len(best) + 1), best, color="#bbbbbb", linestyle=":", label="could be")
    first.set_ylim(bottom=0)
    cached.set_ylim(-3, 103)
    for axes, text in ((first, "first token, ms"), (cached, "prompt tokens found cached, %")):
        axes.set_xlabel("turn")
        axes.set_title(text, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    cached.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)


def _first_token_ms(turn: Sequence[Figures]) -> float | None:
    known = [one.first_token_ms.p50 for one in turn if one.first_token_ms.p50 is not None]
    return median(known) if known else None
