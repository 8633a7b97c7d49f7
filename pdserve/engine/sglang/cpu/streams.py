"""CUDA's stream and event interface where work is done at once: every wait is over when it starts."""

from __future__ import annotations

import torch


class Event(torch.cpu.Event):
    """Recorded and complete from the start; elapsed times are 0 ms."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        super().__init__()

    def elapsed_time(self, end: torch.cpu.Event) -> float:
        return 0.0


class Stream(torch.cpu.Stream):
    """Runs nothing asynchronously."""

    def __init__(self, device: object = None, priority: int = -1) -> None:
        super().__init__(priority)

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
