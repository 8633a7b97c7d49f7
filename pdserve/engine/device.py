"""The device of this process, chosen without a CUDA context: children are spawned later."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pdserve.errors import StartupError
from pdserve.resources.machine import has_nvidia_gpu

Device = Literal["cpu", "cuda"]
_CPUINFO: Final = Path("/proc/cpuinfo")

# Set by a worker before it imports SGLang, and inherited by its children. The SGLang plugin reads it.
ENGINE_ENV = "PDSERVE_ENGINE_DEVICE"
# SGLang's own switch for its CPU platform; read when its modules are imported.
SGLANG_CPU_ENV = "SGLANG_USE_CPU_ENGINE"
# Torch's own switch for its compiler, read when SGLang's modules are imported and functions are called.
NO_COMPILER_ENV = "TORCHDYNAMO_DISABLE"
# OpenMP's threads spin while they wait for work. Workers that share cores so take them from each other: a
# prefill and a decode worker on two cores answered a request in 5.6 s, and in 0.33 s with this. What a user
# sets stays.
IDLE_THREADS_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# SGLang's own choice of cores for each rank on a CPU, as "0-3|4-7".
_CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"

# What ranks of one host say to each other stays on it. What a user sets stays.
ONE_HOST_ENV = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
# The same for NCCL, of a worker with several ranks. A single rank uses NCCL only in a group that a trainer
# forms with it (`init_weights_update_group`), and trainers may be on other hosts.
ONE_HOST_RANKS_ENV = {"NCCL_SOCKET_IFNAME": "lo"}

# Set by a worker whose ranks are on several hosts, and inherited by its children.
SEVERAL_HOSTS_ENV = "PDSERVE_SEVERAL_HOSTS"


def cpu_ranks_env(ranks: int, cores: Sequence[int], *, several_hosts: bool = False) -> dict[str, str]:
    """The environment of a worker on a CPU whose `ranks` processes share `cores`. What a user sets stays.
    `several_hosts`: it has ranks on other hosts, too.

    SGLang 0.5.23 gives each rank a NUMA node of its own, and refuses more ranks than nodes, unless it is told
    the cores of each. It counts the ranks of all hosts, and the nodes of this one. Its own kernels bind
    threads to them; torch's threads are as many as OpenMP is told.
    """
    if ranks == 1 and not several_hosts:
        return {}
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return {
        _CORES_OF_RANKS: "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(each),
    }


def detect_device() -> Device:
    """ "cuda" where torch sees a GPU, else "cpu".

    Raises StartupError when a GPU is present but torch cannot use it, or when the accelerator is of a kind
    that pdserve has not been taught.
    """
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        if torch.version.hip is not None:
            raise StartupError(
                "the accelerator here is a ROCm GPU, which pdserve does not support: use CUDA or "
                "engine.device cpu"
            )
        return "cuda"
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None:
        raise StartupError(
            f"the accelerator here is {other.type!r}, which pdserve does not support: "
            "use CUDA or engine.device cpu"
        )
    if torch.version.cuda is not None and has_nvidia_gpu():
        raise StartupError(
            "an NVIDIA GPU is present but torch cannot use it: check the driver with nvidia-smi, "
            "or use engine.device cpu"
        )
    return "cpu"


def computes_bfloat16(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo names instructions for bfloat16: Intel's, AMD's or Arm's."""
    return re.search(r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo, re.M) is not None


def choose_dtype(wanted: str, device: Device) -> str:
    """The data type of weights and activations for the configured `wanted`: float32 for "auto" where a
    processor without bfloat16 computes the model, since it would take six times as long in bfloat16.
    """
    if wanted != "auto" or device != "cpu" or computes_bfloat16(_CPUINFO.read_text(encoding="utf-8")):
        return wanted
    return "float32"


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device to run on for the configured `wanted`.

    Raises StartupError when "cuda" is wanted and there is none, or the accelerator's state is unknown.
    """
    if wanted == "cpu":
        return "cpu"
    found = detect_device()
    if wanted == "cuda" and found != "cuda":
        raise StartupError(
            "engine.device cuda was asked for, but torch sees no CUDA GPU here: use engine.device cpu or auto"
        )
    return found
