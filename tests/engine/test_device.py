"""Which device a worker runs on, and with what. Torch is scripted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine import device
from pdserve.errors import StartupError


def torch(*, cuda: bool = False, other: str | None = None, hip: str | None = None) -> Any:
    """As much of torch as device detection looks at."""
    found = None if other is None else SimpleNamespace(type=other)
    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: cuda),
        version=SimpleNamespace(hip=hip, cuda=None),
        accelerator=SimpleNamespace(current_accelerator=lambda check_available: found),
    )


@pytest.mark.parametrize(
    ("here", "wanted", "chosen"),
    [
        (torch(cuda=True), "auto", "cuda"),
        (torch(cuda=True), "cpu", "cpu"),
        (torch(), "auto", "cpu"),
        (torch(other="npu"), "cpu", "cpu"),
        (torch(other="npu"), "auto", "'npu', which pdserve does not support"),
        (torch(cuda=True, hip="6.0"), "auto", "ROCm GPU, which pdserve does not support"),
        (torch(), "cuda", "torch sees no CUDA GPU"),
    ],
)
def test_a_gpu_is_found_and_an_unknown_or_absent_accelerator_stops_the_start(
    here: Any, wanted: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.importlib, "import_module", lambda _name: here)
    if chosen in ("cpu", "cuda"):
        assert device.choose_device(wanted) == chosen
    else:
        with pytest.raises(StartupError, match=chosen):
            device.choose_device(wanted)


@pytest.mark.parametrize(
    ("ranks", "cores", "several_hosts", "told"),
    [
        (2, [0, 1], False, ("0|1", "1")),
        (2, [2, 3, 6, 7, 9], False, ("2,3|6,7", "2")),
        (4, [5, 8], False, ("5|8|5|8", "1")),
        (1, [0, 1], False, None),
        # SGLang counts ranks of other hosts, too, and refuses more than this one has NUMA nodes
        (1, [0, 1], True, ("0,1", "2")),
    ],
)
def test_ranks_on_a_cpu_share_the_cores_that_there_are(
    ranks: int, cores: list[int], several_hosts: bool, told: tuple[str, str] | None
) -> None:
    names = ("SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    found = device.cpu_ranks_env(ranks, cores, several_hosts=several_hosts)
    assert found == ({} if told is None else dict(zip(names, told, strict=True)))


@pytest.mark.parametrize(
    ("wanted", "on", "line", "chosen"),
    [
        ("auto", "cpu", "flags\t\t: fpu avx2 avx512f avx512vl", "float32"),
        ("auto", "cpu", "bugs\t\t: bf16", "float32"),
        ("auto", "cpu", "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile", "auto"),
        ("auto", "cpu", "Features\t: fp asimd i8mm bf16 dgh", "auto"),
        ("auto", "cuda", "flags\t\t: fpu avx2", "auto"),
        ("bfloat16", "cpu", "flags\t\t: fpu avx2", "bfloat16"),
    ],
)
def test_auto_is_float32_where_a_processor_without_bfloat16_computes(
    wanted: str, on: device.Device, line: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbogomips : 1\n")
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    assert device.choose_dtype(wanted, on) == chosen
