"""How many pages of a read a node brought up from a tier below its memory, for whoever asked for the read.

SGLang's interface returns per page only whether it came. A caller that wants to know more opens `counting`
around its call, in the same thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class SsdPages:
    """Pages of the reads in one `counting` block."""

    pages: int = 0


_counting: ContextVar[SsdPages | None] = ContextVar("pdserve_ssd_pages", default=None)


@contextlib.contextmanager
def counting() -> Iterator[SsdPages]:
    """Count the pages of the reads in this block."""
    count = SsdPages()
    token = _counting.set(count)
    try:
        yield count
    finally:
        _counting.reset(token)


def came_from_ssd(pages: int) -> None:
    """A read in this thread found so many pages below a node's memory."""
    count = _counting.get()
    if count is not None:
        count.pages += pages
