"""What other threads give to a thread that sleeps at descriptors."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """`give` and `stop` are called by any thread, the others by the one whose inbox it is."""

    def __init__(self) -> None:
        """Raises OSError if there is no descriptor left."""
        self._lock = threading.Lock()  # of all below
        self._items: list[T] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._woken = False
        self.ended = False
        """Nothing is taken any more."""
        self.stopping = False
        """The thread is to end soon."""

    def fileno(self) -> int:
        """For polling: it is readable when there is something to take, or the thread is to end."""
        return self._wake

    @property
    def waiting(self) -> bool:
        """Whether its thread has not taken notice yet of the last thing that it was given or told."""
        return self._woken

    def give(self, *items: T) -> bool:
        """None: the thread only looks around. False: the thread has ended."""
        with self._lock:
            if self.ended:
                return False
            self._items += items
            self._signal()
        return True

    def stop(self) -> None:
        """Have the thread end soon. Idempotent."""
        with self._lock:
            self.stopping = True
            if not self.ended:
                self._signal()

    def take(self) -> list[T]:
        """What was given since, in order."""
        if not self._woken:
            return []
        with self._lock:
            items, self._items = self._items, []
            self._woken = False
            os.eventfd_read(self._wake)
        return items

    def end(self) -> list[T]:
        """Refuse what is given from now on, and free the descriptor. Returns what nobody took. Idempotent."""
        with self._lock:
            if self.ended:
                return []
            self.ended = True
            os.close(self._wake)
            items, self._items = self._items, []
        return items

    def _signal(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)
