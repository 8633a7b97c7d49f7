"""When a process that died is started again. Pure: the clock is an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.up.config import ClusterSettings, Restart

MAX_BACKOFF_S: Final = 30.0
MAX_DOUBLINGS: Final = 30  # a power of more would some day be no float


def restart_delay_s(
    restart: Restart, status: int, restarts_s: Sequence[float], now_s: float, settings: ClusterSettings
) -> float | None:
    """Seconds to wait before starting a process again that ended with `status`, or None: give up.

    `restarts_s` holds the times of its earlier restarts. A process that ends by itself with status 0 did not
    fail, so `on-failure` leaves it ended.
    """
    if restart == "never" or status == 0:
        return None
    recent = sum(1 for at_s in restarts_s if now_s - at_s < settings.restart_window_s)
    if recent >= settings.max_restarts:
        return None
    return min(settings.restart_backoff_s * 2.0 ** min(recent, MAX_DOUBLINGS), MAX_BACKOFF_S)
