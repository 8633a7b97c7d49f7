"""Runs a supervisor over stand-in processes, in a process of its own, and looks at what becomes of them."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pdserve.errors import StartupError
from pdserve.up.control import Request, ask
from tests.support.left_behind import reaper

STAND_IN = Path(__file__).with_name("stand_in.py")
STAND_INS = ("-S", str(STAND_IN))
REAL_NODES = (str(STAND_IN.with_name("real_nodes.py")),)
REAL_BUT_WORKERS = ("-m", "tests.support.up.real_but_workers")
"""What Python runs in pdserve's launcher."""
TIMEOUT_S = 90.0

RUN = """
import os, sys
from pathlib import Path
from pdserve.errors import PdserveError
from pdserve.up.cli import run_plan
from pdserve.up.config import read_cluster_file
from pdserve.up.launchers.launcher import open_launcher
from pdserve.up.planner import Planner
from pdserve.up import lifecycle
lifecycle.RESTART_BACKOFF_S = 0.05
file, run_dir, on, *program = sys.argv[1:]
cluster = read_cluster_file(Path(file), {"cluster.run_dir": run_dir}, {})
try:
    launcher = open_launcher(on, os.environ, cluster.cluster)
    planner = Planner(cluster, launcher, source=file, program=(sys.executable, *program))
    sys.exit(run_plan(planner.plan(), launcher, planner.scaled))
except PdserveError as error:
    print("REFUSED", error, flush=True)
    sys.exit(1)
"""


class Cluster:
    """A running supervisor."""

    def __init__(self, process: subprocess.Popen[str], journal: Path, run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.lines: list[str] = []
        self._journal = journal
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from here on that matches."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} in time:\n" + "\n".join(self.lines)) from None
            if line is None:
                raise AssertionError(f"ended without a line like {pattern!r}:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def ask_to_restart(self) -> None:
        """By the control socket; the answer is not waited for."""
        request = Request("restart")
        threading.Thread(target=lambda: _ask(self.run_dir, request), daemon=True).start()

    def finish(self) -> int:
        """Wait for the end; the rest of the output goes to `lines`."""
        status = self.process.wait(TIMEOUT_S)
        while (line := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.lines.append(line)
        return status

    def journal(self) -> list[dict[str, Any]]:
        """What the stand-ins noted, in order."""
        return [json.loads(line) for line in self._journal.read_text().splitlines()]

    def wait_for_note(self, role: str, what: str) -> None:
        """Wait until a stand-in has noted this."""
        wait_until(
            lambda: (
                self._journal.exists()
                and (role, what) in [(note["role"], note["what"]) for note in self.journal()]
            ),
            f"{role}: {what}",
        )

    def started(self) -> dict[str, int]:
        """Process id of the latest start of each role."""
        return {entry["role"]: entry["pid"] for entry in self.journal() if entry["what"] == "start"}

    @property
    def url(self) -> str:
        return next(m[1] for line in self.lines if (m := re.search(r"ready at (http://\S+)", line)))


def _ask(run_dir: Path, request: Request) -> None:
    with suppress(StartupError):  # the cluster may stop before
        ask(run_dir, request, TIMEOUT_S)


@contextmanager
def running(
    tmp_path: Path,
    toml: str,
    *,
    program: Sequence[str] = STAND_INS,
    on: str = "local",
    variables: Mapping[str, str] | None = None,
    **popen: Any,
) -> Iterator[Cluster]:
    """A cluster file's supervisor; `JOURNAL` in the file is the stand-ins' journal. `popen`: how to start it
    otherwise; there are no lines where its output goes elsewhere. `on`: the launcher, with `variables` in its
    environment; `PYTHON` among them runs it. Killed at the end if need be.
    """
    journal, file, run_dir = tmp_path / "journal", tmp_path / "cluster.toml", tmp_path / "run"
    file.write_text(toml.replace("JOURNAL", json.dumps(str(journal))[1:-1]), encoding="utf-8")
    process = subprocess.Popen(
        [
            (variables or {}).get("PYTHON", sys.executable),
            "-c",
            RUN,
            str(file),
            str(run_dir),
            on,
            *program,
        ],
        text=True,
        start_new_session=True,
        # a buffered stdout, as a user has: what is left in it is flushed at exit
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        | dict(variables or {}),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **popen},
    )
    reaper().watch(process.pid)
    try:
        yield Cluster(process, journal, run_dir)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()
                process.wait()
        reaper().forget(process.pid)


def processes_that_mention(text: str) -> list[str]:
    """Command lines of live processes that hold `text` (a test's own directory), and of their sessions'
    members.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found


def wait_until(condition: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll until `condition()` holds; fails the test when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)
