"""Runs commands of `pdserve bench`, in a process of their own or in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, Final
from unittest.mock import patch

import pytest

from pdserve.cli import main

ORIGIN: Final = {"date", "commit", "machine", "load_before", "command", "versions"}
Done = subprocess.CompletedProcess[str]


def bench(*arguments: str, **environment: str) -> Done:
    """In a process. `environment`: variables that differ from this one's."""
    command = [sys.executable, "-m", "pdserve", "bench", *arguments]
    whole = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=whole)


def bench_here(*arguments: str) -> Done:
    """In this process, which saves the second that another needs to start."""
    words = ["bench", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["pdserve", *words]),
        pytest.raises(SystemExit) as ended,
    ):
        main(words)
    status = ended.value.code
    assert status is None or isinstance(status, int)
    return Done(words, status or 0, out.getvalue(), err.getvalue())


def results(done: Done) -> list[dict[str, Any]]:
    """The JSON lines of a run that came to its end, without the first, which says where they come from."""
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    origin, *rows = map(json.loads, done.stdout.splitlines())
    assert origin.keys() >= ORIGIN
    assert origin["command"].startswith("pdserve bench ")
    assert rows, done.stderr
    return rows


def assert_refused(complaint: str, *arguments: str) -> None:
    """The command ends with status 2 and one line, before the work."""
    done = bench_here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert complaint in line
