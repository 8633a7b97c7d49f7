"""Hosts on one machine: network namespaces, each with a cable (a veth pair) to a switch (a bridge) in a
namespace of its own. Nothing is added to the machine's own network; the addresses exist in these namespaces
alone.

A program started by `ip netns exec` also has a mount namespace of its own, so for the pool it is on another
host: it cannot be offered mapped memory, and takes UCX or TCP.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TypeVar

import pytest

SUBNET = "10.77.13"
REQUIRED = "PDSERVE_NETNS"  # "required": what cannot be made is a failure, not a skip
COMMAND_TIMEOUT_S = 20.0
CLONE_NEWNET: Final = 0x4000_0000
LIBC: Final = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


class Lab:
    """Named hosts at SUBNET.1, SUBNET.2, and so on."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"pdserve{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._hosts = list(hosts)
        self._dropping: set[str] = set()

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts.index(host) + 1}"

    def _port(self, host: str) -> str:
        """Of the switch: names of network cards are short."""
        return f"port{self._hosts.index(host) + 1}"

    def build(self) -> None:
        """Raises CalledProcessError or FileNotFoundError where the machine does not allow it."""
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in self._hosts:
            space = f"{self._prefix}-{host}"
            _run("ip", "netns", "add", space)
            port = self._port(host)
            veth = ("add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", self._switch, "link", *veth)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in (*(f"{self._prefix}-{host}" for host in self._hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    # --- the network's own faults

    def unplug(self, host: str) -> None:
        """Pull its cable out of the switch."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "down")

    def plug_in(self, host: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "up")

    def drop_to(self, host: str) -> None:
        """The switch forgets every packet for this host; what it sends still arrives.

        netem where the kernel has it; else a token bucket too small for any packet.
        """
        root = ("qdisc", "add", "dev", self._port(host), "root")
        try:
            _run("tc", "-n", self._switch, *root, "netem", "loss", "100%")
        except subprocess.CalledProcessError:
            _run("tc", "-n", self._switch, *root, "tbf", "rate", "1kbit", "burst", "1", "limit", "1")
        self._dropping.add(host)

    def stop_dropping(self) -> None:
        for host in self._dropping:
            _run("tc", "-n", self._switch, "qdisc", "del", "dev", self._port(host), "root")
        self._dropping.clear()

    def heal(self) -> None:
        self.stop_dropping()
        for host in self._hosts:
            self.plug_in(host)

    def received_bytes(self, host: str) -> int:
        """By its network card, since the start."""
        shown = _run("ip", "-n", f"{self._prefix}-{host}", "-s", "-j", "link", "show", "dev", "eth0")
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    # --- programs

    def start(
        self,
        host: str,
        *command: str,
        log: IO[bytes],
        pipes: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A Python program on that host. `variables`: of its environment, beside ours."""
        whole = ["ip", "netns", "exec", f"{self._prefix}-{host}", sys.executable, *command]
        pipe = subprocess.PIPE if pipes else None
        out = subprocess.PIPE if pipes else log
        env = {**os.environ, **(variables or {})}
        return subprocess.Popen(whole, stdin=pipe, stdout=out, stderr=log, env=env)

    def enter(self, host: str) -> None:
        """The calling thread goes to that host, with all threads that it starts, for good."""
        with Path(f"/var/run/netns/{self._prefix}-{host}").open() as space:
            if LIBC.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no way to {host}")

    def call(self, host: str, function: Callable[[], T]) -> T:
        """What the function returns there. It shares the memory and files of the test."""
        with ThreadPoolExecutor(1, initializer=self.enter, initargs=(host,)) as there:
            return there.submit(function).result()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def lab(*hosts: str) -> Iterator[Lab]:
    """A network of these hosts; the test is skipped, with the reason, where it cannot be made."""
    made = Lab(hosts)
    try:
        try:
            made.build()
        except (OSError, subprocess.SubprocessError) as error:
            _cannot(error)
        yield made
    finally:
        made.remove()


def _cannot(error: Exception) -> None:
    said = (getattr(error, "stderr", "") or str(error)).strip()
    if shutil.which("ip") is None:
        said = "the program ip is missing: apt-get install iproute2"
    elif os.geteuid() != 0:
        said = f"it takes root: {said}"
    reason = f"no network namespaces here, so UCX and TCP between hosts are NOT tested: {said}"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-30:])
