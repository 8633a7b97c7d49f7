"""Which device a worker runs on. Torch is scripted."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize(
    ("ranks", "cores", "shares", "threads"),
    [
        (2, [0, 1], "0|1", "1"),
        (2, [2, 3, 6, 7, 9], "2,3|6,7", "2"),
        (4, [5, 8], "5|8|5|8", "1"),
    ],
)
def test_ranks_on_a_cpu_share_the_cores_that_there_are(
    ranks: int, cores: list[int], shares: str, threads: str
) -> None:
    assert device.cpu_ranks_env(ranks, cores) == {
        "SGLANG_CPU_OMP_THREADS_BIND": shares,
        "OMP_NUM_THREADS": threads,
    }


def test_one_rank_on_a_cpu_has_all_cores() -> None:
    assert device.cpu_ranks_env(1, [0, 1]) == {}
    # SGLang counts ranks of other hosts, too, and refuses more than this one has NUMA nodes
    alone_here = device.cpu_ranks_env(1, [0, 1], several_hosts=True)
    assert alone_here == {"SGLANG_CPU_OMP_THREADS_BIND": "0,1", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2 avx512f avx512vl", False),
        ("Features\t: fp asimd i8mm bf16 dgh", True),
        ("bugs\t\t: bf16", False),
    ],
)
def test_bfloat16_is_known_by_the_processors_flags(line: str, has: bool) -> None:
    assert device.computes_bfloat16(f"processor\t: 0\n{line}\nbogomips : 1\n") is has


@pytest.mark.parametrize(
    ("wanted", "on", "flags", "chosen"),
    [
        ("auto", "cpu", "avx2", "float32"),
        ("auto", "cpu", "avx512_bf16", "auto"),
        ("auto", "cuda", "avx2", "auto"),
        ("bfloat16", "cpu", "avx2", "bfloat16"),
    ],
)
def test_auto_is_float32_where_a_processor_without_bfloat16_computes(
    wanted: str, on: device.Device, flags: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    assert device.choose_dtype(wanted, on) == chosen
