"""Markdown from rows and text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; a `|` in a cell is escaped."""
    lines = [_row(columns), "|---" * len(columns) + "|"]
    lines += [_row(row) for row in rows]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def one_line(text: str) -> str:
    """The text with its line breaks and repeated spaces as single spaces."""
    return " ".join(text.split())


def with_block(text: str, name: str, block: str) -> str:
    """`text` with the lines between the markers of `name` replaced. Raises ValueError where they are not."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the markers of {name} must be in the page once")
    head, rest = text.split(begin)
    return head + begin + block.strip("\n") + "\n" + end + rest.split(end, 1)[1]
