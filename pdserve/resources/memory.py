"""The memory of this machine, and what is free of it, limited by the container's cgroups; and how many files
this process may open.

Both versions of cgroups are supported, each with the limits of all ancestors. Source (kernel documentation):
admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst, filesystems/proc.rst.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

GB: Final = 10**9
GIB: Final = 1 << 30
UNLIMITED: Final = 1 << 62
_HOST_POOLS_SHARE: Final = 0.5
_UNPIN_BYTES_S: Final = 5 * GB
Look: TypeAlias = Callable[[Path], int | None]
"""Reads a limit of a group's directory; None: it has none."""


class Mount(NamedTuple):
    """A line of /proc/self/mounts."""

    fstype: str
    path: Path
    options: frozenset[str]


def host_pool_gb(memory_bytes: int, gpu_bytes: Sequence[int]) -> int:
    """The host memory of one rank in 10^9 bytes, at least 1: the ranks on all GPUs of a host share half of
    its memory, each at most twice the memory of its GPU, since its host pool holds what the GPU evicts.

    `memory_bytes`: what the host or container has; `gpu_bytes`: of all its GPUs, whoever computes there.
    """
    share = int(memory_bytes * _HOST_POOLS_SHARE) // max(1, len(gpu_bytes))
    return max(1, min(share, *(2 * each for each in gpu_bytes)) // GB)


def release_s(pinned_bytes: int) -> float:
    """What so much pinned memory adds to the end of the processes that hold it."""
    return pinned_bytes / _UNPIN_BYTES_S


def mounts(text: str | None = None) -> list[Mount]:
    """All mounts of this process. Later ones cover earlier ones."""
    if text is None:
        text = os.fsdecode(Path("/proc/self/mounts").read_bytes())
    found = []
    for line in text.splitlines():
        _, path, fstype, options, *_ = line.split(" ")
        found.append(Mount(fstype, Path(_unescaped(path)), frozenset(options.split(","))))
    return found


def _unescaped(path: str) -> str:
    """The kernel writes space, tab, line feed and backslash as octal numbers, and no other byte."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)


def mount_of(path: Path) -> Mount:
    """The mount of an existing path."""
    path = path.resolve()
    over = [mount for mount in mounts() if path == mount.path or mount.path in path.parents]
    return max(enumerate(over), key=lambda each: (len(each[1].path.parts), each[0]))[1]


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes that can be allocated now without swapping out used memory."""
    machine = UNLIMITED
    for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            machine = int(line.split()[1]) * 1024
    return min(machine, *_in_cgroups(proc, _left_v2, _left_v1), UNLIMITED)


def limit_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes that this machine or container has, used or not."""
    machine = UNLIMITED
    for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal:"):
            machine = int(line.split()[1]) * 1024
    return min(machine, *_in_cgroups(proc, _limit_v2, _limit_v1), UNLIMITED)


def _in_cgroups(proc: Path, look_v2: Look, look_v1: Look) -> Iterator[int]:
    try:
        groups = os.fsdecode((proc / "self" / "cgroup").read_bytes()).splitlines()
        mounted = mounts(os.fsdecode((proc / "self" / "mounts").read_bytes()))
    except OSError:
        return  # a kernel without cgroups
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _found(mounted, "cgroup2", None, path, look_v2)
        elif "memory" in controllers.split(","):
            yield from _found(mounted, "cgroup", "memory", path, look_v1)


def _found(mounted: list[Mount], fstype: str, option: str | None, path: str, look: Look) -> Iterator[int]:
    """What the group and each visible ancestor say that has a limit."""
    for mount in mounted:
        if mount.fstype != fstype or (option is not None and option not in mount.options):
            continue
        group = mount.path / path.lstrip("/")
        for directory in (group, *group.parents):
            if (found := look(directory)) is not None:
                yield found
            if directory == mount.path:
                break


def _left_v2(directory: Path) -> int | None:
    return _left_of(directory, "memory.max", "memory.current", "inactive_file ")


def _left_v1(directory: Path) -> int | None:
    return _left_of(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


def _limit_v2(directory: Path) -> int | None:
    return _limit_of(directory, "memory.max")


def _limit_v1(directory: Path) -> int | None:
    return _limit_of(directory, "memory.limit_in_bytes")


def _limit_of(directory: Path, limit_name: str) -> int | None:
    """None: no limit in this group."""
    try:
        limit = (directory / limit_name).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _left_of(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Limit minus usage. Inactive cached file contents count as free. None: no limit in this group."""
    if (limit := _limit_of(directory, limit_name)) is None:
        return None
    try:
        usage = int((directory / usage_name).read_text(encoding="utf-8"))
        stat = (directory / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    cached = sum(int(line.removeprefix(cache_name)) for line in stat if line.startswith(cache_name))
    return max(0, limit - usage + cached)


def raise_open_files() -> int | None:
    """Let this process open as many files as it may: each connection is one. Returns how many; None: without
    a limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else hard
