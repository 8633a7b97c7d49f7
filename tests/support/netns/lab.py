"""Hosts on one machine, for tests: what cannot be made here is skipped, with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from pdserve.bench.hosts.network import Network as Lab

REQUIRED = "PDSERVE_NETNS"  # "required": what cannot be made is a failure, not a skip


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


def last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-30:])
