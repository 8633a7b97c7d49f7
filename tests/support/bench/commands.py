"""Runs commands of `python -m benchmarks`, in a process of their own or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

from tests.support.command import Done, pdserve_here

ORIGIN: Final = {"date", "commit", "machine", "load_before", "command", "versions"}


def bench(*arguments: str, **environment: str) -> Done:
    """In a process. `environment`: variables that differ from this one's."""
    command = [sys.executable, "-m", "pdserve", "bench", *arguments]
    whole = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=whole)


def bench_here(*arguments: str, **environment: str) -> Done:
    """In this process."""
    return pdserve_here("bench", *arguments, **environment)


def results(done: Done) -> list[dict[str, Any]]:
    """The JSON lines of a run that came to its end, without the first, which says where they come from."""
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    origin, *rows = map(json.loads, done.stdout.splitlines())
    assert origin.keys() >= ORIGIN
    assert origin["command"].startswith("python -m benchmarks ")
    assert rows, done.stderr
    return rows


def assert_refused(complaint: str, *arguments: str) -> None:
    """The command ends with status 2 and one line, before the work."""
    done = bench_here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert complaint in line
