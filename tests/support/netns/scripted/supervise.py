"""`pdserve up FILE --on ssh`, with scripted workers: `python -m tests.support.netns.scripted.supervise
FILE`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from pdserve.up.cli import run_plan
from pdserve.up.config import read_cluster_file
from pdserve.up.launchers.launcher import open_launcher
from pdserve.up.planner import Planner

PROGRAM: Final = (sys.executable, "-m", "tests.support.netns.scripted.program")


def main(file: Path) -> int:
    """Until SIGTERM; gives the exit status."""
    cluster = read_cluster_file(file, {}, {})
    launcher = open_launcher("ssh", os.environ, cluster.cluster)
    planner = Planner(cluster, launcher, source=str(file), program=PROGRAM)
    return run_plan(planner.plan(), launcher, planner.scaled)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
