"""`pdserve bench restart`: a short run; a busy machine's times are not judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


def test_a_killed_node_has_its_pages_again_and_the_client_finds_them() -> None:
    command = [
        sys.executable,
        "-m",
        "pdserve",
        "bench",
        "restart",
        "--pages",
        "3000",
        "--rounds",
        "2",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["pages"], outcome["kept"], outcome["wrong"]) == (3000, 1.0, 0)
    assert [one["first_hit_s"] > 0 for one in outcome["restarts"]] == [True, True]
    assert all("took over 3000 pages" in one["log"] for one in outcome["restarts"])
