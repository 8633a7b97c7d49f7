"""How much of the pool is used, for LMCache's gauges, which must not wait for it."""

from __future__ import annotations

import threading
import time
from typing import Final

from pdserve.integrations.lmcache.spaces import Spaces

RENEW_S: Final = 5.0


class UsageWatch:
    """Asks the pool in a thread of its own, when somebody wants to know. Thread-safe."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._lock = threading.Lock()
        self._latest = (0, 0)
        self._renewed_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._closed = False

    def latest(self) -> tuple[int, int]:
        """(bytes of our namespaces, bytes of all nodes) as of the last answer; zeros before the first one."""
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if not (self._closed or is_running) and time.monotonic() - self._renewed_s >= RENEW_S:
                self._thread = threading.Thread(target=self._renew, name="pdserve-usage", daemon=True)
                self._thread.start()
            return self._latest

    def close(self) -> None:
        """Wait for the question that is under way: it ends with its clients."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _renew(self) -> None:
        used_bytes = capacity_bytes = 0
        for client in self._spaces.clients:
            reports = client.status().values()
            capacity_bytes = max(capacity_bytes, sum(report.capacity_bytes for report in reports))
            used_bytes += sum(
                space.slot_bytes
                for report in reports
                for space in report.namespaces
                if space.name == client.namespace
            )
        with self._lock:
            self._latest = used_bytes, capacity_bytes
            self._renewed_s = time.monotonic()
