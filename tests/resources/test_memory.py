"""What there is for an arena, in a container too; read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.resources.memory import GB, available_bytes, host_pool_gb, limit_bytes, mount_of, mounts

MIB = 1 << 20


def make_proc(root: Path, cgroup: str, *mounted: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:    2048 kB\nBuffers: 1 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "mounts").write_text("".join(f"{line}\n" for line in mounted))
    return root / "proc"


def make_group(directory: Path, limit: int | str, usage: int, inactive: int, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "") if version == 2 else (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    )  # fmt: skip
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {inactive}\nactive_file 7\n")


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, "0::/\n", f"cgroup2 {tmp_path}/cg cgroup2 rw 0 0")
    assert available_bytes(proc) == 2 * MIB
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"a/b": (1 * MIB, 0x80000, 0)}, 0x80000),
        ({"a": (1 * MIB, 0x80000, 0x40000), "a/b": ("max", 1, 0)}, 0xC0000),
        ({"": (3 * MIB, 0, 0), "a": (1 * MIB, 2 * MIB, 0)}, 0),
        ({"a/b": (64 * MIB, 0, 0)}, 2 * MIB),
    ],
    ids=["its own", "an ancestor's, cache counted as free", "over its limit", "larger than the machine"],
)
def test_a_cgroups_limit_counts_and_those_of_its_ancestors(
    tmp_path: Path, limits: dict[str, tuple[int | str, int, int]], left: int
) -> None:
    proc = make_proc(tmp_path, "0::/a/b\n", f"cgroup2 {tmp_path}/cg cgroup2 rw,relatime 0 0")
    for path, limit in limits.items():
        make_group(tmp_path / "cg" / path, *limit)
    assert available_bytes(proc) == left


def test_version_1_is_understood_too(tmp_path: Path) -> None:
    proc = make_proc(
        tmp_path,
        "5:memory:/docker/x\n3:cpu,cpuacct:/\n0::/\n",
        f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0",
        f"cgroup {tmp_path}/mem cgroup rw,memory 0 0",
    )
    make_group(tmp_path / "mem" / "docker/x", 1 * MIB, 0x40000, 0x10000, version=1)
    make_group(tmp_path / "cpu" / "docker/x", 1, 0, 0, version=1)  # no memory controller
    assert available_bytes(proc) == 0xD0000


def test_a_group_that_is_not_visible_here_limits_by_what_is(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, "0::/outside/of/this\n", f"cgroup2 {tmp_path}/cg cgroup2 rw 0 0")
    make_group(tmp_path / "cg", 1 * MIB, 0, 0)
    assert available_bytes(proc) == 1 * MIB


def test_mounts_are_read_and_the_nearest_is_found() -> None:
    text = "a / ext4 rw 0 0\nnone /mnt/with\\040space hugetlbfs rw,pagesize=2M 0 0\n"
    assert mounts(text)[1].path == Path("/mnt/with space")
    assert mounts(text)[1].options == {"rw", "pagesize=2M"}
    assert mounts("a /mnt/\u00fc\\040\\134\\011x tmpfs rw 0 0\n")[0].path == Path("/mnt/\u00fc \\\tx")
    assert mount_of(Path("/dev/shm")).fstype == "tmpfs"
    assert mount_of(Path("/proc/self")).fstype == "proc"


def test_the_limit_counts_what_is_used_too(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, "0::/a/b\n", f"cgroup2 {tmp_path}/cg cgroup2 rw,relatime 0 0")
    assert limit_bytes(proc) == 99999 * 1024
    make_group(tmp_path / "cg" / "a", 3 * MIB, 2 * MIB, 0)
    assert limit_bytes(proc) == 3 * MIB


@pytest.mark.parametrize(
    ("memory_gb", "gpus_gb", "expected_gb"),
    [
        (2000, [80] * 8, 125),
        (2000, [80], 160),  # twice its GPU: a host pool holds what the GPU evicts
        (4, [80] * 8, 1),
    ],
)
def test_the_ranks_of_a_host_share_half_of_its_memory(
    memory_gb: int, gpus_gb: list[int], expected_gb: int
) -> None:
    assert host_pool_gb(memory_gb * GB, [gb * GB for gb in gpus_gb]) == expected_gb
