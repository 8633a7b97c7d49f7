"""What the commands of `pdserve pool` print: numbers and tables for people, JSON for programs."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from pdserve.security.log_text import printable

MAX_ROWS: Final = 4096  # a pool has at most 1,024 nodes and 4,096 namespaces


class _PlainTable(Table):
    """Its text is of nodes, which may be hostile: nothing of it acts on the terminal, and it ends."""

    most_rows = MAX_ROWS

    def add_row(self, *cells: Any, **options: Any) -> None:
        """A line; beyond `most_rows` none."""
        if self.row_count < self.most_rows:
            super().add_row(
                *(printable(cell) if isinstance(cell, str) else cell for cell in cells), **options
            )
        elif self.row_count == self.most_rows:
            super().add_row("... and more")


class _PlainConsole(Console):
    """Text that is printed with it is one line, and acts on the terminal in no way."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print them."""
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


def plain(value: Any) -> Any:
    """A message as JSON shows it: by field name, though the wire has arrays; keys and other bytes in hex."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name != "id"}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def as_json(value: Any) -> str:
    """One line."""
    return msgspec.json.encode(plain(value)).decode()


def make_table(title: str, *headings: str, left: int = 1, fold: int = 0, most_rows: int = MAX_ROWS) -> Table:
    """A table whose first `left` columns are text and the others numbers; where there is too little room,
    column `fold` goes over several lines.
    """
    table = _PlainTable(title=printable(title), box=box.SIMPLE_HEAD, title_style="bold", padding=(0, 1, 0, 0))
    table.title_justify = "left"
    table.most_rows = most_rows
    for place, heading in enumerate(headings):
        justify: JustifyMethod = "left" if place < left else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=place != fold)
    return table


def make_console() -> Console:
    """Standard output; wide enough for any line where it is a file or a pipe."""
    console = _PlainConsole(highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console
    return _PlainConsole(highlight=False, emoji=False, markup=False, width=140)


def complain(text: str) -> None:
    """A line on standard error."""
    typer.echo(printable(f"pdserve pool: {text}"), err=True)


def size(size_bytes: float) -> str:
    """Bytes in the unit that gives three or four digits."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def duration(seconds: float) -> str:
    """As 3d 4:05:06, without the days where there are none."""
    if not math.isfinite(seconds):
        return "-"
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


def share(part: float, whole: float) -> str:
    """A percentage, or a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def rate(per_second: float) -> str:
    """Events a second."""
    return f"{per_second:,.0f}" if per_second >= 10 or not per_second else f"{per_second:.1f}"
