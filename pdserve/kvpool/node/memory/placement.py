"""The kind of memory of an arena: huge or ordinary pages, and their NUMA node. Linux.

Three kinds, by `huge_pages`:

    off            ordinary pages of the tmpfs that `arena_dir` lies in
    2MiB, 1GiB     pages of that size, reserved by the administrator, from a mounted hugetlbfs
                   (Documentation/admin-guide/mm/hugetlbpage.rst). The arena is a file there, and
                   <arena_dir>/<node>/arena a link to it
    advise         transparent huge pages of 2 MiB, if the kernel finds free ones, from a tmpfs mounted with
                   huge=advise, within_size or always (mm/transhuge.rst)

With a NUMA node the arena's pages are bound to it (mbind(2), set_mempolicy(2)) before they are allocated. The
policy belongs to the file, so it also holds for pages that clients touch first. The C library has no function
for the system call, so it is called by number. `numactl` would bind all memory of this process, but no page
that a client touches first. A tmpfs with `mpol=` needs root and a mount for each node.

All memory is allocated at the start. If the machine cannot provide it, the start fails with a one-line error.

Slabs suit a size of pages. A slab holds whole slots, and its remainder is never used: of a slab of 32 MiB
with pages of 20 MiB that is 37 %. A larger slab has a smaller remainder, relative to its size. But it moves
between sizes of pages as a whole. So slabs grow no further than needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.errors import StartupError
from pdserve.resources.memory import available_bytes, mount_of, mounts

SLOT_ALIGN_BYTES: Final = 4096
MIN_SLOT_BYTES: Final = (
    16 << 10
)  # smaller pages take this much: a row of the slot table is for 96 bytes of it
SLAB_BYTES: Final = 32 << 20
SLABS: Final = 16
"""Least number of slabs, so that pages of several sizes find room in a small arena too."""
MAX_SLAB_BYTES: Final = 2 << 30  # no page is larger, and the index keeps a page's length in 32 bits
MAX_UNUSED: Final = 0.1
"""Most of a node's memory that pages of the size it was told should leave unused, as a share."""


def least_slab(capacity_bytes: int) -> int:
    """The size of slabs for pages of unknown sizes: a power of two, `SLAB_BYTES` at most."""
    part = max(MIN_SLOT_BYTES, capacity_bytes // SLABS)
    return min(SLAB_BYTES, 1 << part.bit_length() - 1)


def slab_for(page_bytes: int, *, capacity_bytes: int, unit_bytes: int = 1) -> int:
    """The smallest multiple of `least_slab` in which pages of this size leave `MAX_UNUSED` of the capacity
    unused at most; else the one where they leave least. The whole slabs are a multiple of `unit_bytes`, where
    that is possible. `page_bytes` 0: unknown.
    """
    least = least_slab(capacity_bytes)
    if not page_bytes:
        return least
    slot_bytes = max(MIN_SLOT_BYTES, -(-page_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES)
    best, best_used = least, 0
    for slab in range(least, min(capacity_bytes, MAX_SLAB_BYTES) + 1, least):
        slabs = capacity_bytes // slab
        used = slabs * (slab // slot_bytes) * slot_bytes
        if used > best_used and slabs * slab % unit_bytes == 0:
            best, best_used = slab, used
            if used >= (1 - MAX_UNUSED) * capacity_bytes:
                break
    return best


def wastes(slab_bytes: int, slot_bytes: int) -> bool:
    """Whether slots of this size leave more than `MAX_UNUSED` of a slab unused."""
    return slab_bytes % slot_bytes > MAX_UNUSED * slab_bytes


GIB: Final = 1 << 30
MIB: Final = 1 << 20
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
_MPOL_BIND: Final = 2
_MPOL_MF_MOVE: Final = 2
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_POPULATE_BYTES: Final = 256 * MIB
_SYS: Final = Path("/sys")


@dataclass(frozen=True)
class Placement:
    """The memory options of `PoolNodeConfig`. `huge_page_bytes` 0: not from a hugetlbfs."""

    huge_page_bytes: int = 0
    advise: bool = False
    hugetlbfs: Path | None = None  # None: the hugetlbfs mounted with this page size
    numa_node: int | None = None

    def home(self, directory: Path) -> Path:
        """The path of the arena file of a node with this `directory`. Raises StartupError."""
        if not self.huge_page_bytes:
            return directory / "arena"
        flat = "-".join(directory.absolute().parts[1:])
        return _hugetlbfs(self.huge_page_bytes, self.hugetlbfs).absolute() / flat / "arena"

    def check_fits(self, name: str, path: Path, needed: int, replaced: int) -> None:
        """Raises StartupError if a file of `needed` bytes at `path` does not fit.

        `replaced`: bytes of the old file of the same kind, which will be freed.
        """
        if self.numa_node is not None:
            self._check_node(name)
        if self.huge_page_bytes:
            self._check_huge_pages(name, needed, replaced)
            return
        if self.advise:
            _check_advice(name, path.parent)
        space = os.statvfs(path.parent)
        free = space.f_bavail * space.f_frsize + replaced
        if needed > free:
            raise does_not_fit(name, path.parent, needed, free)
        available = available_bytes() + replaced
        if needed > available:
            raise StartupError(
                f"node {name}: arena of {needed / GIB:.2f} GiB does not fit in memory "
                f"({available / GIB:.2f} GiB available): lower capacity_bytes"
            )
        if self.numa_node is not None:
            on_node = _free_on_node(self.numa_node) + replaced
            if needed > on_node:
                raise StartupError(
                    f"node {name}: arena of {needed / GIB:.2f} GiB does not fit on NUMA node "
                    f"{self.numa_node} ({on_node / GIB:.2f} GiB free): lower capacity_bytes, or choose "
                    "another numa_node"
                )

    def allocate(self, name: str, fd: int, size: int) -> None:
        """Allocate the pages of the empty file `fd`. Raises StartupError, or OSError if there are too few."""
        if not self.advise and self.numa_node is None:
            os.posix_fallocate(fd, 0, size)
            return
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size, flags=mmap.MAP_SHARED) as memory:
            self.apply(name, memory)
            if self.advise:
                _populate(memory)
            else:
                os.posix_fallocate(fd, 0, size)

    def apply(self, name: str, memory: mmap.mmap) -> None:
        """Set the kernel's policy for the pages of a mapped arena. Raises StartupError.

        Present pages are moved to the NUMA node, except pages that another process has mapped.
        """
        if self.advise:
            memory.madvise(_MADV_HUGEPAGE)
        if self.numa_node is not None:
            _bind(name, memory, self.numa_node)

    def _check_node(self, name: str) -> None:
        assert self.numa_node is not None
        online = numa_nodes()
        if self.numa_node not in online:
            there = ", ".join(map(str, online)) or "none"
            raise StartupError(
                f"node {name}: numa_node = {self.numa_node}: this machine's NUMA nodes are: {there}: choose "
                "one of them, or leave numa_node out"
            )

    def _check_huge_pages(self, name: str, needed: int, replaced: int) -> None:
        size = self.huge_page_bytes
        pool = _huge_page_pool(size, self.numa_node)
        where = "" if self.numa_node is None else f" on NUMA node {self.numa_node}"
        free = free_huge_pages(size, self.numa_node) + replaced // size
        pages = -(-needed // size)
        if pages > free:
            wanted = _number(pool / "nr_hugepages") + pages - free
            raise StartupError(
                f"node {name}: arena of {needed / GIB:.2f} GiB needs {pages} huge pages of {size >> 20} MiB"
                f"{where}, {max(0, free)} are free: as root, 'echo {wanted} "
                f'> {pool}/nr_hugepages\', or lower capacity_bytes, or set huge_pages = "off"'
            )


def does_not_fit(name: str, directory: Path, needed: int, free: int | None) -> StartupError:
    """The file system of `directory` is too small; `free` bytes of it are free, if that is known."""
    space = "" if free is None else f" ({free / GIB:.2f} GiB free)"
    return StartupError(
        f"node {name}: arena of {needed / GIB:.2f} GiB does not fit in {directory}{space}: lower "
        "capacity_bytes or choose another arena_dir"
    )


def free_huge_pages(page_bytes: int, numa_node: int | None = None) -> int:
    """Number of free huge pages, of the NUMA node if one is given."""
    pool = _huge_page_pool(page_bytes, numa_node)
    free = _number(pool / "free_hugepages") - _number(pool / "resv_hugepages")
    return free + max(0, _number(pool / "nr_overcommit_hugepages") - _number(pool / "surplus_hugepages"))


def _huge_page_pool(page_bytes: int, numa_node: int | None) -> Path:
    name = f"hugepages-{page_bytes // 1024}kB"
    if numa_node is None:
        return _SYS / "kernel/mm/hugepages" / name
    return _SYS / f"devices/system/node/node{numa_node}/hugepages" / name


def numa_nodes() -> list[int]:
    """The online NUMA nodes of this machine. Empty: the kernel has no NUMA support."""
    try:
        text = (_SYS / "devices/system/node/online").read_text(encoding="utf-8").strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def _hugetlbfs(page_bytes: int, given: Path | None) -> Path:
    """A mounted hugetlbfs with pages of this size. Raises StartupError if there is none."""
    wanted = f"pagesize={page_bytes >> 20}M"
    same = {wanted, f"pagesize={page_bytes >> 30}G"} if page_bytes >= GIB else {wanted}
    found = [m.path for m in mounts() if m.fstype == "hugetlbfs" and m.options & same]
    if given is not None:
        if any(path == given or path in given.parents for path in found):
            return given
        raise StartupError(
            f"huge_pages_dir {given} is not in a hugetlbfs with pages of {page_bytes >> 20} MiB: as root, "
            f"'mount -t hugetlbfs -o {wanted} none {given}'"
        )
    if not found:
        where = "/dev/hugepages"
        raise StartupError(
            f"no hugetlbfs with pages of {page_bytes >> 20} MiB is mounted: as root, 'mkdir -p "
            f'{where} && mount -t hugetlbfs -o {wanted} none {where}\', or set huge_pages = "off"'
        )
    return found[-1]


def _check_advice(name: str, directory: Path) -> None:
    """Raises StartupError if the tmpfs ignores the advice (madvise) for huge pages."""
    mount = mount_of(directory)
    if mount.fstype != "tmpfs" or not mount.options & {"huge=advise", "huge=within_size", "huge=always"}:
        how = f"'mount -o remount,huge=advise {mount.path}'" if mount.fstype == "tmpfs" else "use a tmpfs"
        raise StartupError(
            f'node {name}: huge_pages = "advise": {mount.path} has no transparent huge pages: as root, '
            f'{how}, or set huge_pages = "off"'
        )


def _populate(memory: mmap.mmap) -> None:
    """Allocate every page by touching it: fallocate ignores the advice. Raises OSError."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = _address(memory)
    for offset in range(0, len(memory), _POPULATE_BYTES):
        size = min(_POPULATE_BYTES, len(memory) - offset)
        if madvise(start + offset, size, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            # EFAULT replaces the SIGBUS of a touch without space
            number = errno.ENOSPC if number == errno.EFAULT else number
            raise OSError(number, os.strerror(number))


def _bind(name: str, memory: mmap.mmap, node: int) -> None:
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise StartupError(f"node {name}: numa_node is not supported on {platform.machine()}: leave it out")
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    arguments = (
        _address(memory),
        len(memory),
        _MPOL_BIND,
        ctypes.addressof(mask),
        words * 64 + 1,
        _MPOL_MF_MOVE,
    )
    if syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0:
        return
    error = ctypes.get_errno()
    if error == errno.EIO:
        return  # the policy is set; pages that other processes have mapped stay in their place
    hint = "give the container CAP_SYS_NICE, or " if error == errno.EPERM else ""
    raise StartupError(
        f"node {name}: the arena cannot be bound to NUMA node {node}: {os.strerror(error)}: {hint}leave "
        "numa_node out"
    )


def _address(memory: mmap.mmap) -> int:
    view = (ctypes.c_char * 0).from_buffer(memory)
    return ctypes.addressof(view)


def _free_on_node(node: int) -> int:
    """Free bytes of the NUMA node, including inactive cached file contents."""
    text = (_SYS / f"devices/system/node/node{node}/meminfo").read_text(encoding="utf-8")
    found = dict(re.findall(r"(MemFree|Inactive\(file\)):\s+(\d+) kB", text))
    return 1024 * sum(int(value) for value in found.values())


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="utf-8"))
    except OSError:
        return 0
