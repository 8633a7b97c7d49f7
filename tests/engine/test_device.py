"""Which device a worker runs on. Torch is scripted."""

from __future__ import annotations

import pytest

from pdserve.engine import device
from pdserve.errors import StartupError


class Accelerators:
    """As much of torch as device detection looks at."""

    def __init__(self, *, cuda: bool, other: str | None = None) -> None:
        self.cuda = self
        self.version = self
        self.accelerator = self
        self.hip = None
        self._cuda, self._other = cuda, other

    def is_available(self) -> bool:
        return self._cuda

    def current_accelerator(self, check_available: bool) -> Accelerators | None:
        return self if self._other else None

    @property
    def type(self) -> str | None:
        return self._other


def test_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.importlib, "import_module", lambda _name: Accelerators(cuda=True))
    assert device.choose_device("auto") == "cuda"
    assert device.choose_device("cpu") == "cpu"


def test_unknown_accelerator_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device.importlib, "import_module", lambda _name: Accelerators(cuda=False, other="npu")
    )
    with pytest.raises(StartupError, match="'npu', which pdserve does not support"):
        device.choose_device("auto")
    assert device.choose_device("cpu") == "cpu"


def test_cuda_wanted_but_absent_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect_device", lambda: "cpu")
    with pytest.raises(StartupError, match="torch sees no CUDA GPU"):
        device.choose_device("cuda")
