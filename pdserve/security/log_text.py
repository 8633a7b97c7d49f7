"""Sanitizes untrusted text for terminals and logs. Pure."""

from __future__ import annotations

from typing import Final

MAX_CHARS: Final = 4096


def printable(text: str, most_chars: int = MAX_CHARS) -> str:
    """One line without characters that a terminal or a reader of logs would act on, such as ESC, line ends
    and those that turn the direction of writing. Each is written as in a literal of Python. Longer text is
    cut.
    """
    if len(text) > most_chars:
        text = text[:most_chars] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
