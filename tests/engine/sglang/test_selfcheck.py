"""The self-check names what is missing. No SGLang is imported: places of the standard library
stand for it.
"""

from __future__ import annotations

import pytest

from pdserve.engine import device
from pdserve.engine.sglang import selfcheck
from pdserve.engine.sglang.selfcheck import Place, missing_places
from pdserve.errors import StartupError


def test_places_that_fit_are_silent() -> None:
    places = (Place("json", "dumps", ("obj", "indent")), Place("json", "JSONEncoder.encode", ("o",)))
    assert list(missing_places(places)) == []


def test_each_misfit_is_named() -> None:
    places = (
        Place("no_such_module", "x"),
        Place("json", "JSONEncoder.gone"),
        Place("json", "dumps", ("obj", "speed", "colour")),
    )
    assert list(missing_places(places)) == [
        "no_such_module.x: No module named 'no_such_module'",
        "json.JSONEncoder.gone is not there",
        "json.dumps takes no colour, speed",
    ]


def test_another_sglang_version_is_only_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selfcheck, "version", lambda _name: "9.9.9")
    selfcheck._check_version()
    assert "SGLang 9.9.9 is installed; pdserve is tested with" in caplog.text


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
