"""Parts of first-token time as lines of text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.plot import picture
from benchmarks.serving.parts import Sample, Weights, bars

WIDTH: Final = 50  # characters of the longest bar
COLOURS: Final = {
    "queue": "#c2c28f",
    "settle": "#b0b0b0",
    "prefill": "#1f5fa8",
    "compute": "#1f5fa8",
    "publish": "#d9822b",
    "put": "#d9822b",
    "pull": "#6fa8dc",
    "get": "#6fa8dc",
    "decode": "#8a8a5c",
    "router": "#b04a4a",
}
ROWS: Final = ("first token", "router", "prefill worker", "decode worker", "pages put", "pages got")


def text(weights: Weights) -> Iterator[str]:
    """One turn's medians, a line for each part."""
    yield (
        f"turn {weights.turn}: first token after {weights.first_token:,.1f} ms; medians of "
        f"{weights.requests} requests of {weights.prompt_tokens:,} tokens, {weights.cached_tokens:,} cached"
    )
    for name, spent in weights.parts.items():
        yield _line(name, spent, weights.first_token)
        inside = {"prefill": weights.in_prefill, "decode": weights.in_decode}.get(name, {})
        for part, part_ms in inside.items():
            yield _line(f"  {part}", part_ms, weights.first_token)
        if inside:
            yield _line("  the rest", max(0.0, spent - sum(inside.values())), weights.first_token)
    hidden, beside = _share(weights.put_hidden, weights.put), _share(weights.get_beside_put, weights.get)
    yield f"  pages put for {weights.put:,.1f} ms, {hidden} of it while computing"
    yield f"  pages got for {weights.get:,.1f} ms, {beside} of it while others were put"


def plot_weights(path: Path, samples: Sequence[Sample], title: str) -> None:
    """The median request of each turn as rows of bars over time, as a PNG."""
    turns = sorted({sample.turn for sample in samples})
    with picture(path, len(turns), 1, title, figsize=(12, 3.2 * len(turns))) as axes:
        for turn, axis in zip(turns, axes[:, 0], strict=True):
            mine = sorted((one for one in samples if one.turn == turn), key=lambda one: one.first_token_ms)
            middle = mine[len(mine) // 2]
            for bar in bars(middle):
                row, length = -ROWS.index(bar.row), bar.end - bar.start
                axis.barh(row, length, left=bar.start, height=0.8, color=COLOURS.get(bar.name, "#e0e0e0"))
                if length > 0.04 * middle.first_token_ms:
                    label = f"{bar.name} {length:,.0f}".strip()
                    colour = "white" if bar.name in ("prefill", "compute") else "black"
                    at = {"x": bar.start + length / 2, "y": row, "ha": "center", "va": "center"}
                    axis.text(s=label, color=colour, fontsize=8, **at)
            axis.set_yticks([-number for number in range(len(ROWS))], ROWS)
            axis.set_title(f"turn {turn}: {middle.prompt_tokens:,} tokens, ms", loc="left", fontsize=10)
            axis.set_xlim(0, middle.first_token_ms)


def _line(name: str, spent: float, whole: float) -> str:
    share = spent / whole if whole else 0.0
    bar = "█" * round(WIDTH * share)
    return f"  {name:<12} {spent:>10,.1f} ms {share:>6.1%}  {bar}".rstrip()


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
