"""Stand-ins for Slurm's commands: a job with the hosts n1 and n2, whose steps run on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# as srun does: options first, then the words of the task, whose output and status it gives back
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames"*) printf 'n1\\nn2\\n' ;;
  *node*) printf 'NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.1\\nNodeName=n2 NodeAddr=127.0.0.2\\n' ;;
  requeue*) echo "$2" >>"$REQUEUED" ;;
esac
"""


@contextmanager
def slurm_commands(directory: Path) -> Iterator[dict[str, str]]:
    """Variables by which a supervisor finds them and its job."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    yield {
        "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        "REQUEUED": str(directory / "requeued"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
    }
