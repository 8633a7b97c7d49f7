"""Becomes a container of a pod, as root, in its network:
`python -m tests.support.kubernetes.contain FILE ROOT`.

FILE says what Kubernetes would give it: names of other pods, volumes, environment, user, capabilities,
command. ROOT is a new directory, which only the container sees filled. Its root is this machine's own, under
an overlay that takes no writes once the mounts are made. So what it can read here is more than in its image.
What it can write, as whom, and with which system calls, is the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.kubernetes.seccomp import forbid

PR_SET_NO_NEW_PRIVS: Final = 38
RUNTIMES_SHM: Final = "64m"
"""What a container has at /dev/shm where no volume is mounted."""
ROOT: Final = Path(__file__).resolve().parents[3]


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def make_root(base: Path, hosts: dict[str, str], volumes: list[dict[str, Any]], user: int) -> Path:
    """The container's root directory, within `base`. `hosts`: address by name."""
    base.mkdir()
    mount("-t", "tmpfs", "pod", str(base))
    root, upper, work = (base / name for name in ("root", "upper", "work"))
    for directory in (root, upper, work):
        directory.mkdir()
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    mount("-t", "overlay", "overlay", "-o", layers, str(root))
    for kernels in ("/proc", "/sys", "/dev"):
        mount("--rbind", kernels, f"{root}{kernels}")
    mount("-t", "tmpfs", "shm", "-o", f"mode=1777,size={RUNTIMES_SHM}", f"{root}/dev/shm")
    ours = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
    for directory in ours:  # an image has them where everybody may read
        for parent in (directory, *directory.parents):
            below = Path(f"{root}{parent}")
            below.chmod(below.stat().st_mode | 0o555)
    lines = [f"{address} {name} {name.partition('.')[0]}" for name, address in hosts.items()]
    Path(f"{root}/etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    for volume in volumes:
        place = within(root, volume["path"])
        place.mkdir(parents=True, exist_ok=True)
        if (source := volume.get("source")) is not None:
            mount("--bind", source, str(place))
            mount("-o", "remount,bind,ro", str(place))
        else:
            options = f"mode=2777,gid={user}" + (f",size={volume['size']}" if volume.get("size") else "")
            mount("-t", "tmpfs", "volume", "-o", options, str(place))
    for directory in ours:  # a volume may lie over them
        if not (place := Path(f"{root}{directory}")).exists():
            place.mkdir(parents=True)
            mount("--bind", str(directory), str(place))
    mount("-o", "remount,bind,ro", str(root))
    return root


def within(root: Path, path: str) -> Path:
    """Where the path leads in a root that is entered later. Links to absolute paths would lead out of it."""
    place = root
    for name in Path(path).parts[1:]:
        place = place / name
        if place.is_symlink():
            target = place.readlink()
            place = within(root, str(target)) if target.is_absolute() else place.parent / target
    return place


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    user = asked["user"]
    os.chroot(make_root(Path(sys.argv[2]), asked["hosts"], asked["volumes"], user))
    os.chdir("/")
    os.setgroups([user])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    forbid(asked["capabilities"])
    os.execvpe(asked["command"][0], asked["command"], asked["env"])


if __name__ == "__main__":
    main()
