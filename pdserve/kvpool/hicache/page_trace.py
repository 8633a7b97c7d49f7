"""When a worker's pages moved: a line of JSON in a file for each of SGLang's calls to the storage backend.

For `python -m benchmarks weights`; off unless PDSERVE_PAGE_TRACE names a file. Times are of `time.time()`, which
processes of one host share. These are not spans of `pdserve.tracing`: SGLang's storage threads, in the
scheduler's process, know no request that a span could belong to, and have no exporter.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

import msgspec

logger = logging.getLogger(__name__)

VARIABLE: Final = "PDSERVE_PAGE_TRACE"


class PageSpan(msgspec.Struct, frozen=True):
    """One call: how many pages were asked for, from when to when."""

    what: Literal["exists", "get", "put"]
    pages: int
    start_s: float
    end_s: float


class PageTrace:
    """Thread-safe: a line is one write to a file that is only appended to."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._file: int | None = None
        if path := environment.get(VARIABLE):
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError as error:
                logger.warning("%s=%s cannot be written: %s", VARIABLE, path, error.strerror)

    @contextmanager
    def span(self, what: Literal["exists", "get", "put"], pages: int) -> Iterator[None]:
        """Of the block. Never raises of its own."""
        if self._file is None:
            yield
            return
        start_s = time.time()
        try:
            yield
        finally:
            line = msgspec.json.encode(PageSpan(what, pages, start_s, time.time())) + b"\n"
            _write(self._file, line)


def _write(file: int, line: bytes) -> None:
    try:
        os.write(file, line)
    except OSError:  # a full disk must not hurt serving
        return
