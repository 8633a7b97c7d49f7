"""A stand-in for `pynvml`: GPUs as a test wants them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace


class StandInNvml:
    """`nodes`: PCI bus number of each GPU; an error of the driver: `broken`."""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, *, memory_bytes: int = 80 << 30, broken: Sequence[str] = ()) -> None:
        self.count = count
        self.memory_bytes = memory_bytes
        self.broken = broken
        self.open = 0

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802  NVML's name
        self._check("init")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._check("handle")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}000-aa"

    def nvmlDeviceGetName(self, _handle: int) -> bytes:  # noqa: N802  older versions give bytes
        return b"NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=self.memory_bytes)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 0x1A:02X}:00.0")
