"""`pdserve up FILE --on hosts`, with scripted workers: `python -m pdserve.bench.hosts.supervise FILE`."""

from __future__ import annotations

import os
import random
import secrets
import sys
from pathlib import Path
from typing import Final

from pdserve.up.claims import free_ports, is_ours
from pdserve.up.cli import run_plan
from pdserve.up.config import read_cluster_file
from pdserve.up.places.base import open_place
from pdserve.up.plan import demands, make_plan
from pdserve.up.site import Site

PROGRAM: Final = (sys.executable, "-m", "pdserve.bench.hosts.program")


def main(file: Path) -> int:
    """Until SIGTERM; gives the exit status."""
    cluster = read_cluster_file(file, {}, {})
    place = open_place("hosts", os.environ)
    place.submit([], cluster.cluster)
    hosts = place.assign(demands(cluster)) or {}
    node_token, page_token, cluster_token = (secrets.token_urlsafe(32) for _ in range(3))
    plan = make_plan(
        cluster,
        program=PROGRAM,
        run_dir=cluster.cluster.run_dir,
        uid=os.getuid(),
        ports=free_ports("127.0.0.1", random.SystemRandom()),
        cluster_token=cluster_token,
        site=Site(
            hosts,
            node_token,
            page_token,
            frozenset(name for name, host in hosts.items() if not is_ours(host)),
        ),
    )
    return run_plan(plan, place)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
