"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich import box
from rich.table import Table


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]] = (),
    *,
    left: Collection[str] = (),
    caption: str | None = None,
    no_wrap: bool = False,
) -> Table:
    """Columns of figures are aligned right, those named in `left` left."""
    drawn = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        drawn.add_column(name, justify="left" if name in left else "right", no_wrap=no_wrap)
    for row in rows:
        drawn.add_row(*row)
    return drawn
