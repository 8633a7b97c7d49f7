"""Debian packages that tests need. launch/test.sh asks for them before the first test runs.

    python -m tests.support.debian [--fast | --all] [PYTEST_ARGUMENTS]

It installs nothing: it names the packages that the tests of these words lack, and ends with status 1 then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple


class Program(NamedTuple):
    """What tests run: a command, or a library if it ends in `.so` and a number."""

    name: str
    package: str
    tests: tuple[str, ...] = ()
    """Files and folders that fail without it."""
    extended: tuple[str, ...] = ()
    """Those that need it and are not in the default run, or skip what needs it where it is missing."""


_NETWORKS: Final = (
    *("tests/netns", "tests/e2e/test_hosts.py", "tests/e2e/test_hostile.py"),
    "tests/docs/test_attacks.py",
)
PROGRAMS: Final = (
    Program("etcd", "etcd-server", ("tests/discovery", "tests/e2e")),
    Program(
        "redis-server",
        "redis-server",
        (
            "tests/router/sharing/test_carriers.py",
            "tests/router/sharing/test_processes.py",
            "tests/e2e/test_exact_turns.py",
        ),
    ),
    Program("chromium", "chromium", ("tests/router/admin/test_live_page.py",)),
    Program("libibverbs.so.1", "libibverbs1", ("tests/e2e",)),  # Mooncake's wheel does not bring it
    Program("promtool", "prometheus", extended=("tests/up/test_monitoring.py",)),
    Program("sshd", "openssh-server", extended=("tests/contracts/test_launcher_contract.py",)),
    Program("ip", "iproute2", extended=_NETWORKS),
    Program("nft", "nftables", extended=_NETWORKS),
)


def needed(words: Sequence[str]) -> list[Program]:
    """The programs of the tests that these words of launch/test.sh select; with --all those of tests that are
    not in the default run, or skip without a program, as well.
    """
    paths = [word.partition("::")[0].rstrip("/") for word in words if word.startswith("tests")]
    found = []
    for program in PROGRAMS:
        tests = [*program.tests, *(program.extended if "--all" in words or paths else ())]
        if "--fast" in words:
            tests = [test for test in tests if not _is_within(test, "tests/e2e")]
        if any(
            not paths or any(_is_within(test, path) or _is_within(path, test) for path in paths)
            for test in tests
        ):
            found.append(program)
    return found


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def is_there(program: Program) -> bool:
    if ".so." in program.name:
        with contextlib.suppress(OSError):
            ctypes.CDLL(program.name)
            return True
        return False
    return shutil.which(program.name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def main(words: Sequence[str]) -> int:
    """The exit status: 1 where a package is missing, which it names in one line."""
    packages = " ".join(program.package for program in needed(words) if not is_there(program))
    if packages:
        how = f"apt-get install --no-install-recommends {packages}"
        print(f"test.sh: error: these tests need Debian's {packages}: '{how}' as root", file=sys.stderr)
    return int(bool(packages))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
