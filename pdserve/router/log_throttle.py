"""Log lines that a fault would repeat for every request: one for each key in a while, with the number left
out.
"""

from __future__ import annotations

import logging
import time

INTERVAL_S = 1.0


class ThrottledLog:
    """At most one line per key and interval. Keys are worker ids, so their number is bounded by the
    configuration.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._last: dict[str, tuple[float, int]] = {}
        """Key → (when a line was written last, lines left out since)."""

    def warning(self, key: str, message: str, *args: object, now_s: float | None = None) -> None:
        """Write the line, or count it as left out."""
        now_s = time.monotonic() if now_s is None else now_s
        last_s, left_out = self._last.get(key, (float("-inf"), 0))
        if now_s - last_s < self._interval_s:
            self._last[key] = (last_s, left_out + 1)
            return
        self._last[key] = (now_s, 0)
        suffix = f" ({left_out} more like it)" if left_out else ""
        self._logger.warning(message + suffix, *args)
