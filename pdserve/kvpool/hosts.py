"""Which machine is this? Two processes may share memory when their answers are equal."""

from __future__ import annotations

from pathlib import Path


def host_id() -> str:
    """Boot id of the kernel, and the mount and IPC namespaces: two containers on one machine are two hosts,
    since neither sees the other's /dev/shm.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").readlink().name for name in ("mnt", "ipc")]
    return ":".join([boot, *spaces])
