"""A pool node's process, before its loop runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import uvloop
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.process import run_node

def run(serving):
    serving.close()
    print(sys.getswitchinterval())

uvloop.run = run
run_node(PoolNodeConfig(name="n", listen=["unix:/nowhere/n.sock"]))
"""


def test_threads_that_copy_pages_do_not_keep_the_loop_waiting_for_the_interpreter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    assert float(done.stdout) <= 0.001
