"""How many GPUs a worker needs, and which ones it gets. Pure.

A worker's flags for SGLang count as SGLang reads them: the last of a repeated flag counts. Workers whose
table names GPUs get these. The others get theirs largest first, out of the NUMA node with the fewest free
ones that still has enough, else the first that are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.resources.machine import VISIBLE, Gpu, Machine

_FLAGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "tp"),
    **dict.fromkeys(("--pp", "--pp-size", "--pipeline-parallel-size"), "pp"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), "dp"),
    "--nnodes": "nodes",
    "--device": "device",
}
_OURS: Final = ("--base-gpu-id", "--gpu-id-step")


class GpuRequest(msgspec.Struct, frozen=True):
    """What one worker asks for."""

    name: str
    count: int
    """GPUs that its ranks compute on, one each."""
    numbers: tuple[int, ...] | None = None
    """Those that its table names; None: any."""


def gpu_count(words: Sequence[str], device: str = "auto") -> int:
    """GPUs of a worker with these flags for SGLang, on all of its hosts; 0: it runs on the CPU. `device`: of
    its table. Raises ConfigError.
    """
    if flag := next((word.partition("=")[0] for word in words if word.partition("=")[0] in _OURS), ""):
        raise ConfigError(f"{flag}: `pdserve up` gives GPUs to workers: write gpus = [..] instead")
    given = _given(words)
    if (given.get("device") or device) == "cpu":
        return 0
    sizes = {key: _number(given, key) for key in ("tp", "pp", "dp")}
    replicas = 1 if "--enable-dp-attention" in words else sizes["dp"]
    return sizes["tp"] * sizes["pp"] * replicas


def node_count(words: Sequence[str]) -> int:
    """Hosts that a worker's ranks are divided between, by SGLang's flags. Raises ConfigError."""
    return _number(_given(words), "nodes")


def assign(machine: Machine, requests: Sequence[GpuRequest]) -> dict[str, tuple[int, ...]]:
    """Indices of GPUs by worker. Raises ConfigError where they do not fit."""
    free = {gpu.index: gpu for gpu in machine.gpus}
    given: dict[str, tuple[int, ...]] = {}
    for one in sorted(requests, key=lambda one: (one.numbers is None, -one.count)):  # equals keep their order
        for index in one.numbers or ():
            if index not in free:
                owner = next((name for name, taken in given.items() if index in taken), "")
                why = f"is {owner}'s already" if owner else "is not here"
                raise ConfigError(f"{one.name}: GPU {index} of its gpus {why}: name another")
        allowed = {index: free[index] for index in one.numbers or free}
        if len(allowed) < one.count:
            raise ConfigError(
                f"{one.name}: {one.count} GPUs are needed (tp x pp), and {len(allowed)} of "
                f"{len(machine.gpus)} are free here: lower --tp-size, or start fewer workers"
            )
        given[one.name] = choose(one.count, allowed.values())
        for index in given[one.name]:
            del free[index]
    return {one.name: given[one.name] for one in requests}


def choose(count: int, free: Iterable[Gpu]) -> tuple[int, ...]:
    """So many of these, out of one NUMA node where one has enough. There must be enough in all."""
    found = list(free)
    sizes = Counter(gpu.numa_node for gpu in found if gpu.numa_node is not None)
    homes = sorted((size, node) for node, size in sizes.items() if size >= count)
    if homes:
        found = [gpu for gpu in found if gpu.numa_node == homes[0][1]]
    return tuple(sorted(gpu.index for gpu in found)[:count])


def visible(numbers: Sequence[int]) -> dict[str, str]:
    """The environment of a worker that is to see these GPUs alone, in NVML's order. CUDA's own order is the
    fastest first.
    """
    return {VISIBLE: ",".join(map(str, numbers)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def described(machine: Machine, name: str, numbers: Sequence[int]) -> str:
    """Which GPUs a worker gets, in a line for people."""
    taken = [gpu for gpu in machine.gpus if gpu.index in numbers]
    nodes = sorted({gpu.numa_node for gpu in taken if gpu.numa_node is not None})
    where = f", NUMA node{'s' * (len(nodes) > 1)} {_list(nodes)}" if nodes else ""
    return f"{name}: GPU{'s' * (len(numbers) > 1)} {_list(numbers)} ({taken[0].name}{where})"


def _number(given: Mapping[str, str], key: str) -> int:
    text = given.get(key, "1")
    if not text.isdecimal() or int(text) < 1:
        flag = [name for name, meant in _FLAGS.items() if meant == key][-1]
        raise ConfigError(f"{flag} must be a number, at least 1, found {text!r}")
    return int(text)


def _given(words: Sequence[str]) -> dict[str, str]:
    """The last value of each flag that matters."""
    given = {}
    for i, word in enumerate(words):
        flag, is_joined, joined = word.partition("=")
        if flag in _FLAGS:
            given[_FLAGS[flag]] = joined if is_joined else "".join(words[i + 1 : i + 2])
    return given


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
