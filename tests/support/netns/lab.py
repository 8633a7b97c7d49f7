"""Hosts on one machine, for tests: what cannot be made here is skipped, with the reason."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import pytest

from tests.support.netns.machines import Machines
from tests.support.netns.network import Network

REQUIRED = "PDSERVE_NETNS"  # "required": what cannot be made is a failure, not a skip
ROOT: Final = Path(__file__).parents[3]
CLONE_NEWNET: Final = 0x4000_0000
LIBC: Final = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


class Lab(Network):
    """Hosts that threads of a test can go to."""

    def enter(self, host: str) -> None:
        """The calling thread goes to that host, with all threads that it starts, for good."""
        with Path(f"/var/run/netns/{self.space(host)}").open() as space:
            if LIBC.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"no way to {host}")

    def call(self, host: str, function: Callable[[], T]) -> T:
        """What the function returns there. It shares the memory and files of the test."""
        with ThreadPoolExecutor(1, initializer=self.enter, initargs=(host,)) as there:
            return there.submit(function).result()

    def filter(self, rules: str) -> None:
        """More rules for the switch, in the language of nft. Takes nftables."""
        there = ["ip", "netns", "exec", self._switch, "nft", "-f", "-"]
        subprocess.run(there, input=rules, text=True, capture_output=True, check=True)


@contextmanager
def lab(*hosts: str) -> Iterator[Lab]:
    """A network of these hosts; the test is skipped, with the reason, where it cannot be made."""
    made = Lab(hosts)
    try:
        try:
            made.build()
        except (OSError, subprocess.SubprocessError) as error:
            cannot(error)
        yield made
    finally:
        made.remove()


def cannot(error: Exception) -> NoReturn:
    """Skip the test, or fail it where such tests are required."""
    said = (getattr(error, "stderr", "") or str(error)).strip()
    if shutil.which("ip") is None:
        said = "the program ip is missing: apt-get install iproute2"
    elif os.geteuid() != 0:
        said = f"it takes root: {said}"
    reason = f"no network namespaces here, so UCX and TCP between hosts are NOT tested: {said}"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def python_at(hosts: Machines, host: str, *command: str) -> list[str]:
    """What runs a Python program on that host, which finds the programs of the tests."""
    return hosts.words(host, ["env", f"PYTHONPATH={ROOT}", sys.executable, *command])


def last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-30:])
