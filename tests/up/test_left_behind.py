"""What becomes of the servers of a test run that is itself ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.up.cluster import processes_that_mention, wait_until

ROOT = Path(__file__).parents[2]

SERVER = """
import sys, time
from pathlib import Path
from tests.support.e2e.cluster import Process
directory = sys.argv[1]
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", directory]
Process("sleeper", sleeper, Path(directory, "log")).start()
print("up", flush=True)
time.sleep(600)
"""

CLUSTER = """
import sys, time
from pathlib import Path
from tests.support.up.cluster import running
with running(Path(sys.argv[1]), "[[agg]]") as cluster:
    cluster.wait_for("is ready at")
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("program", [SERVER, CLUSTER], ids=["server", "cluster"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_the_test_run_that_started_them(
    tmp_path: Path, program: str, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "up\n"
        finally:
            run.send_signal(number)
    wait_until(lambda: not processes_that_mention(str(tmp_path)), "nothing is left")
