"""This machine, by NVML and sysfs, or another one by a description file."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError, StartupError
from pdserve.resources.memory import limit_bytes
from pdserve.settings.config_file import build_config, read_toml
from pdserve.sizes import parse_bytes

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SHM: Final = Path("/dev/shm")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `index`: NVML's, in the order of PCI addresses."""

    index: int
    memory_bytes: int
    name: str = "GPU"
    numa_node: int | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host."""

    memory_bytes: int
    """All of it, or the limit of the container."""
    shm_bytes: int
    """Size of /dev/shm."""
    gpus: tuple[Gpu, ...] = ()


class GpuKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of one kind in a description file."""

    memory: int | str
    """Memory of each, in bytes or like `80GiB`."""
    name: str = "GPU"
    count: Annotated[int, Meta(ge=1)] = 1
    numa_nodes: list[int] = []
    """NUMA node of each; empty: not known."""


class MachineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine that is described, in TOML."""

    memory: int | str
    shm: int | str | None = None
    """Size of /dev/shm; none: half the memory."""
    gpus: list[GpuKind] = []


def read_machine(path: Path) -> Machine:
    """A described machine. Raises ConfigError."""
    file = build_config(MachineFile, read_toml(path), source=str(path))
    gpus: list[Gpu] = []
    for kind in file.gpus:
        if kind.numa_nodes and len(kind.numa_nodes) != kind.count:
            raise ConfigError(f"{path}: gpus: numa_nodes must name a node for each of the {kind.count} GPUs")
        nodes: list[int | None] = [*kind.numa_nodes] or [None] * kind.count
        for node in nodes:
            size, index = _size(path, kind.memory), len(gpus)
            gpu = Gpu(index=index, memory_bytes=size, name=kind.name, numa_node=node)
            gpus.append(gpu)
    memory = _size(path, file.memory)
    shm = memory // 2 if file.shm is None else _size(path, file.shm)
    return Machine(memory_bytes=memory, shm_bytes=shm, gpus=tuple(gpus))


def this_machine(environment: Mapping[str, str], *, nvml: Any = None, sys: Path = Path("/sys")) -> Machine:
    """This machine, with the GPUs that CUDA_VISIBLE_DEVICES leaves. `nvml`: what stands for pynvml in tests.

    Raises StartupError where a GPU is there and NVML cannot say what it is.
    """
    shm = os.statvfs(_SHM)
    return Machine(
        memory_bytes=limit_bytes(),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        gpus=_gpus(nvml or _nvml(), environment.get(VISIBLE), sys),
    )


def has_nvidia_gpu(dev: Path = Path("/dev")) -> bool:
    """Whether a device of an NVIDIA GPU is here, whatever its number: a container may have one of many.

    Cheaper than NVML, and true where the driver is broken.
    """
    return any(dev.glob("nvidia[0-9]*"))


def _nvml() -> Any:
    """SGLang brings it. Without SGLang nothing here uses a GPU."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("pynvml")
    return None


def _gpus(nvml: Any, visible: str | None, sys: Path) -> tuple[Gpu, ...]:
    """In NVML's order, that of PCI addresses."""
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver: no GPU
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = [{str(index), _text(nvml.nvmlDeviceGetUUID(handle))} for index, handle in enumerate(handles)]
        wanted = range(len(handles)) if visible is None else _visible(visible, names)
        return tuple(_gpu(nvml, index, handles[index], sys) for index in sorted(wanted))
    except nvml.NVMLError as error:
        raise StartupError(f"the GPUs of this machine cannot be read ({error}): see nvidia-smi") from error
    finally:
        nvml.nvmlShutdown()


def _visible(text: str, names: list[set[str]]) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES leaves. CUDA stops at the first word that it does not know; so a
    mistyped one is refused here.
    """
    indices = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        found = [
            i for i, own in enumerate(names) if any(name == word or _is_short(word, name) for name in own)
        ]
        if word == "-1" and not found:
            break
        if len(found) != 1:
            raise StartupError(f"{VISIBLE}={text}: {word} is none of this machine's {len(names)} GPUs")
        indices += found
    return indices


def _is_short(word: str, uuid: str) -> bool:
    return word.startswith("GPU-") and uuid.startswith(word)


def _gpu(nvml: Any, index: int, handle: Any, sys: Path) -> Gpu:
    # NVML writes a PCI domain of 8 digits, the kernel of 4
    address = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return Gpu(
        index=index,
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        numa_node=_numa_node(sys / "bus/pci/devices" / address[-12:]),
    )


def _numa_node(device: Path) -> int | None:
    try:
        node = int((device / "numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _size(path: Path, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
