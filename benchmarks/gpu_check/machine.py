"""What the machine is, and whether its packages fit each other."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu_check.place import Place, Skipped
from pdserve.capacity.gather import this_machine
from pdserve.capacity.memory import GB, GIB

_PACKAGES = ("torch", "sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton", "ucxx-cu13")


def steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`."""
    yield "machine", _machine
    yield "packages", lambda: _packages(place)


def sglang_steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`."""
    yield "self-check", lambda: _self_check(place)


def _machine() -> str:
    found = this_machine(os.environ)
    gpus = [f"GPU {gpu.index}: {gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in found.gpus]
    versions = [f"{name} {_version(name)}" for name in _PACKAGES if _version(name)]
    return "; ".join(
        [
            *(gpus or ["no GPU"]),
            f"{os.cpu_count()} cores, {found.memory_bytes / GB:.0f} GB",
            f"/dev/shm {found.shm_bytes / GB:.0f} GB",
            f"NICs {', '.join(nic.name for nic in found.nics) or 'none'}",
            f"Python {platform.python_version()}",
            *versions,
        ]
    )


def _packages(place: Place) -> str:
    torch = importlib.import_module("torch")
    if place.device == "cpu":
        raise Skipped(f"torch {torch.__version__} runs on the CPU")
    importlib.import_module("sgl_kernel")
    one = torch.ones(1000, device="cuda")
    assert int(one.sum()) == 1000
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"


def _self_check(_place: Place) -> str:
    from pdserve.engine.sglang import selfcheck

    selfcheck.check()
    return f"SGLang {selfcheck.TESTED_SGLANG}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
