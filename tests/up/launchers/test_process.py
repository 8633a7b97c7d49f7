"""How processes are started that end with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from pdserve.up.launchers.sessions import dies_with_parent

ROOT = Path(__file__).parents[2]


def test_the_command_is_the_process_that_was_started() -> None:
    code = "import os, sys; print(os.getpid(), sys.argv[1:], open('/proc/self/status').read())"
    command = dies_with_parent([sys.executable, "-c", code, "a b", "--", "$c"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=30)[0]
    assert said.startswith(f"{process.pid} ['a b', '--', '$c']")
    command = dies_with_parent(["grep", "SigIgn", "/proc/self/status"])
    ignored = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1], 16)
    assert not ignored & 1 << signal.SIGPIPE - 1


def test_it_ends_when_its_parent_is_killed() -> None:
    code = (
        "import subprocess, time; from pdserve.up.launchers.sessions import dies_with_parent\n"
        "child = subprocess.Popen(dies_with_parent(['sh', '-c', 'echo $$; exec sleep 1000']))\n"
        "child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) != parent.pid
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""  # the end of the last process that holds the pipe
    parent.stdout.close()


def test_no_code_of_ours_runs_between_fork_and_exec() -> None:
    """Another thread may hold a lock at the fork, which nobody gives back in the child."""
    users = [path for path in (ROOT / "pdserve").rglob("*.py") if "preexec_fn=" in path.read_text()]
    assert users == []
