"""Hosts with all that a machine has of its own: network, mounts, /dev/shm, host name, IPC, processes.

A machine is an init process in namespaces of its own. It ends with this process. `off` is a power cut: the
cable is pulled first, so nobody is told, and then every process of the machine is gone at once.

`shell` is a script that is called as `ssh` is, and runs its string on the machine by `nsenter`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.netns.network import Network
from tests.support.processes import HarnessError

NOTHING: Final[Mapping[str, str]] = types.MappingProxyType({})
SHM_SIZE: Final = "8g"
BOOT: Final = """
mount --make-rprivate /
mount -t tmpfs -o size={shm} shm /dev/shm
mkdir -p {own} && mount -t tmpfs -o mode=0700 own {own}
mount --bind {directory}/hosts /etc/hosts
{proc}
hostname {name}
trap '' CHLD
echo up
exec cat
"""
"""Children that lose their parent are reaped unseen, since nobody is told of their end."""
SHELL: Final = """#!/bin/sh
. {directory}/$1.env
exec nsenter --target "$(cat {directory}/$1.pid)" --mount --uts --ipc --net $processes sh -c "$2"
"""


class Machines:
    """Hosts of a network. `own`: a directory that is empty and private on each of them but the last, where
    the person sits who runs them all. `environment`: of hosts, lines that a shell reads before every command
    there.
    """

    def __init__(
        self, network: Network, directory: Path, own: Path, environment: Mapping[str, str] = NOTHING
    ) -> None:
        self.network = network
        self.shell = directory / "shell"
        self._directory = directory
        self.own = own
        self._init: dict[str, subprocess.Popen[bytes]] = {}
        names = [f"{network.address(host)} {host}" for host in network.hosts]
        (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))
        self.shell.write_text(SHELL.format(directory=shlex.quote(str(directory))))
        self.shell.chmod(0o700)
        for host in network.hosts:
            processes = "" if host == network.hosts[-1] else "--pid"  # with it nsenter gets a child
            (directory / f"{host}.env").write_text(f"processes={processes}\n{environment.get(host, '')}")

    def on(self, host: str) -> None:
        """Boot it, with empty memory. Raises HarnessError."""
        is_last = host == self.network.hosts[-1]  # its person sees the others' processes
        boot = BOOT.format(
            shm=SHM_SIZE,
            own=shlex.quote(str(self._directory / "nothing" if is_last else self.own)),
            directory=shlex.quote(str(self._directory)),
            proc="" if is_last else "mount -t proc proc /proc",
            name=host,
        )
        spaces = ["--mount", "--uts", "--ipc", *([] if is_last else ["--pid", "--fork", "--kill-child"])]
        command = ["ip", "netns", "exec", self.network.space(host), "unshare", *spaces, "sh", "-ec", boot]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._init[host] = process
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise HarnessError(f"host {host} does not start: see above")
        (self._directory / f"{host}.pid").write_text(f"{process.pid if is_last else _child(process.pid)}\n")
        self.network.plug_in(host)

    def off(self, host: str) -> None:
        """A power cut."""
        self.network.unplug(host)
        self._end(host)

    def close(self) -> None:
        for host in list(self._init):
            self._end(host)

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """What runs `command` there."""
        return [str(self.shell), host, "exec " + shlex.join(command)]

    def _end(self, host: str) -> None:
        process = self._init.pop(host)
        process.kill()  # the kernel ends its child with it, and all of that one's namespace
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def machines(
    hosts: Sequence[str], directory: Path, own: Path, environment: Mapping[str, str] = NOTHING
) -> Iterator[Machines]:
    """Booted, on a network of their own. Raises HarnessError where this machine does not allow it."""
    if os.geteuid() != 0:
        raise HarnessError("hosts of namespaces take root")
    network = Network(hosts)
    try:
        try:
            network.build()
            made = Machines(network, directory, own, environment)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise HarnessError(f"no network namespaces here (apt-get install iproute2): {said}") from None
        try:
            for host in hosts:
                made.on(host)
            yield made
        finally:
            made.close()
    finally:
        network.remove()


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
