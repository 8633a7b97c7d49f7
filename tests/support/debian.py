"""Debian packages that tests need. launch/test.sh asks for them before the first test runs.

    python -m tests.support.debian [--fast | --all] [PYTEST_ARGUMENTS]
    python -m tests.support.debian --install ...       install what these need

A developer is told which packages the tests that he runs need, and nothing is installed. Continuous
integration (CI=true) installs what its run needs, as root does under --all. Services that come with a package
are not started, and not enabled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

POLICY: Final = Path("/usr/sbin/policy-rc.d")
"""Debian's packages ask it before they start a service. Status 101: it may not be started."""
SYSTEMD: Final = Path("/run/systemd/system")


class Program(NamedTuple):
    """What tests run: a command, or a library if it ends in `.so` and a number."""

    name: str
    package: str
    tests: tuple[str, ...] = ()
    """Files and folders that fail without it."""
    extended: tuple[str, ...] = ()
    """Those that need it and are not in the default run, or skip what needs it where it is missing."""
    service: str = ""
    """The unit of systemd that the package would start."""


_NETWORKS: Final = (
    *("tests/netns", "tests/e2e/test_hosts.py", "tests/e2e/test_hostile.py"),
    "tests/docs/test_attacks.py",
)
PROGRAMS: Final = (
    Program(
        "etcd",
        "etcd-server",
        ("tests/discovery/test_etcd_of_pools.py", "tests/discovery/test_etcd_of_workers.py", "tests/e2e"),
        service="etcd",
    ),
    Program(
        "redis-server",
        "redis-server",
        (
            *(
                "tests/router/sharing/test_carriers.py",
                "tests/router/sharing/test_processes.py",
            ),
            "tests/e2e/test_exact_turns.py",
        ),
        service="redis-server",
    ),
    Program("chromium", "chromium", ("tests/router/admin/test_live_page.py",)),
    Program(
        "libibverbs.so.1",  # Mooncake's wheel does not bring it
        "libibverbs1",
        ("tests/e2e",),
    ),
    Program("promtool", "prometheus", extended=("tests/up/test_monitoring.py",), service="prometheus"),
    Program("sshd", "openssh-server", extended=("tests/contracts/test_launcher_contract.py",), service="ssh"),
    Program("ip", "iproute2", extended=_NETWORKS),
    Program("nft", "nftables", extended=_NETWORKS),
)


def needed(words: Sequence[str], *, whole: bool) -> list[Program]:
    """The programs of the tests that these words of launch/test.sh select. `whole`: those of tests that are
    not in the default run, or skip without a program, as well.
    """
    paths = [word.partition("::")[0].rstrip("/") for word in words if word.startswith("tests")]
    found = []
    for program in PROGRAMS:
        tests = [*program.tests, *(program.extended if whole or paths else ())]
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


def install(programs: Iterable[Program]) -> None:
    """Install their packages, and start and enable no service. Only root can."""
    words = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with no_service_starts():
        for command in (["apt-get", "update", "-qq"], [*words, *(program.package for program in programs)]):
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    services = [program.service for program in programs if program.service]
    if services and SYSTEMD.is_dir():
        subprocess.run(["systemctl", "disable", "--quiet", *services], check=False)


@contextlib.contextmanager
def no_service_starts(policy: Path = POLICY) -> Iterator[None]:
    """Packages start no service within the block. A policy that is there already stays, and is asked."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def main(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """The exit status: 1 where a package is missing, which it names in one line."""
    in_ci = environment.get("CI") == "true"
    wanted = needed(words, whole=in_ci or "--all" in words)
    missing = [program for program in wanted if not is_there(program)]
    if not missing:
        return 0
    packages = " ".join(program.package for program in missing)
    if os.geteuid() == 0 and (in_ci or "--all" in words or "--install" in words):
        print(f"test.sh: installing {packages}", file=sys.stderr)
        install(missing)
        return 0
    own = shlex.join([sys.executable, "-m", "tests.support.debian", "--install", *words])
    how = f"'sudo {own}', which starts no service, or 'sudo apt-get install {packages}'"
    print(f"test.sh: error: these tests need Debian's {packages}: run {how}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
