"""Hosts on one machine: network namespaces, each with a cable (a veth pair) to a switch (a bridge) in a
namespace of its own. Nothing is added to the machine's own network; the addresses exist in these namespaces
alone.

A program started by `ip netns exec` also has a mount namespace of its own, so for the pool it is on another
host: it cannot be offered mapped memory, and takes UCX or TCP. machines.py gives hosts more of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Final

SUBNET: Final = "10.77.13"
COMMAND_TIMEOUT_S: Final = 20.0
PACKETS: Final = 10_000
"""Of so many packets a part is lost."""


class Network:
    """Named hosts at SUBNET.1, SUBNET.2, and so on."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"pdserve{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self.hosts = list(hosts)
        self._queued: set[str] = set()

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self.hosts.index(host) + 1}"

    def space(self, host: str) -> str:
        """Name of its network namespace."""
        return f"{self._prefix}-{host}"

    def _port(self, host: str) -> str:
        """Of the switch: names of network cards are short."""
        return f"port{self.hosts.index(host) + 1}"

    def build(self) -> None:
        """Raises CalledProcessError or FileNotFoundError where the machine does not allow it."""
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            space = self.space(host)
            run("ip", "netns", "add", space)
            port = self._port(host)
            veth = ("add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "-n", self._switch, "link", *veth)
            run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in (*map(self.space, self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    # --- the network's own faults

    def unplug(self, host: str) -> None:
        """Pull its cable out of the switch."""
        run("ip", "-n", self._switch, "link", "set", self._port(host), "down")

    def plug_in(self, host: str) -> None:
        run("ip", "-n", self._switch, "link", "set", self._port(host), "up")

    def drop_to(self, host: str) -> None:
        """The switch forgets every packet for this host; what it sends still arrives.

        netem where the kernel has it; else a token bucket too small for any packet.
        """
        try:
            self._queue(host, "netem", "loss", "100%")
        except subprocess.CalledProcessError:
            self._queue(host, "tbf", "rate", "1kbit", "burst", "1", "limit", "1")

    def slow(self, host: str, bits_s: int) -> None:
        """Its cable carries no more than this to it."""
        self._queue(host, "tbf", "rate", f"{bits_s}bit", "burst", "64kb", "latency", "400ms")

    def partition(self, one: str, other: str) -> None:
        """No packet passes between the two. Both reach the others. Takes nftables."""
        ports = self._port(one), self._port(other)
        for inward, outward in (ports, reversed(ports)):
            self._filter(f"iifname {inward} oifname {outward} drop")

    def lose(self, host: str, share: float) -> None:
        """This share of the packets to and from it, drawn at random. Takes nftables."""
        drawn = f"numgen random mod {PACKETS} < {round(share * PACKETS)} drop"
        for way in ("iifname", "oifname"):
            self._filter(f"{way} {self._port(host)} {drawn}")

    def heal(self) -> None:
        for host in self._queued:
            run("tc", "-n", self._switch, "qdisc", "del", "dev", self._port(host), "root")
        self._queued.clear()
        subprocess.run(
            ["ip", "netns", "exec", self._switch, "nft", "flush", "ruleset"], capture_output=True, check=False
        )
        for host in self.hosts:
            self.plug_in(host)

    def received_bytes(self, host: str) -> int:
        """By its network card, since the start."""
        shown = run("ip", "-n", self.space(host), "-s", "-j", "link", "show", "dev", "eth0")
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def _queue(self, host: str, *words: str) -> None:
        run("tc", "-n", self._switch, "qdisc", "add", "dev", self._port(host), "root", *words)
        self._queued.add(host)

    def _filter(self, rule: str) -> None:
        chain = "add chain bridge faults forward { type filter hook forward priority 0; }"
        for line in ("add table bridge faults", chain, f"add rule bridge faults forward {rule}"):
            run("ip", "netns", "exec", self._switch, "nft", line)

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
        whole = ["ip", "netns", "exec", self.space(host), sys.executable, *command]
        pipe = subprocess.PIPE if pipes else None
        out = subprocess.PIPE if pipes else log
        env = {**os.environ, **(variables or {})}
        return subprocess.Popen(whole, stdin=pipe, stdout=out, stderr=log, env=env)


def run(*command: str) -> str:
    """Its output. Raises CalledProcessError."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
