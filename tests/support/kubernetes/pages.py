"""Pages of the pool from within a worker's container, by its own configuration:
`python -m tests.support.kubernetes.pages keep|check COUNT` prints how many were stored, or read back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from pathlib import Path

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, with_pool_secrets
from pdserve.settings.config_file import build_config
from tests.support.kvpool.faulty import get, keys, put


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    (file,) = Path("/etc/pdserve/config").glob("*.toml")
    table = tomllib.loads(file.read_text())["pool"]
    config = with_pool_secrets(build_config(PoolClientConfig, table, source=str(file)), os.environ)
    with contextlib.closing(PoolClient(config, "contract", {}, name="contract")) as client:
        print(sum((put if what == "keep" else get)(client, keys(count))))


if __name__ == "__main__":
    main()
