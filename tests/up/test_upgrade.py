"""The command that upgrades a pool node: no secret is in its words, and it says what went wrong."""

from __future__ import annotations

import asyncio
import sys

import pytest

from pdserve.up import upgrade
from pdserve.up.upgrade import Command, pool_upgrade


def test_a_nodes_token_goes_into_the_environment_and_its_files_stay_files() -> None:
    given = pool_upgrade(("pdserve",), "unix:/run/pool0.sock", {"admin_token": "s3cret"})
    assert given.words == ("pdserve", "pool", "upgrade", "unix:/run/pool0.sock", "--deadline", "30")
    assert given.environment == {"PDSERVE_POOL_TOKEN": "s3cret"}
    config = {
        "admin_token_file": "/etc/token",
        "tls": {"certificate": "/etc/c", "key": "/etc/k", "ca": "/etc/ca"},
    }
    given = pool_upgrade(("pdserve",), "tcp:a:7700", config)
    assert given.words[-2:] == ("--token-file", "/etc/token")
    assert given.environment == {
        "PDSERVE_POOL_TLS_CA": "/etc/ca",
        "PDSERVE_POOL_TLS_CERTIFICATE": "/etc/c",
        "PDSERVE_POOL_TLS_KEY": "/etc/k",
    }


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", ""),
        ("sys.exit('x\\nit would not start')", "it would not start"),
        ("sys.exit(3)", "its upgrade ended with status 3"),
        ("assert os.environ['PDSERVE_POOL_TOKEN'] == 's'", ""),
    ],
)
def test_the_last_line_of_a_command_that_fails_is_what_went_wrong(code: str, problem: str) -> None:
    words = (sys.executable, "-S", "-c", f"import os, sys; {code}")
    assert asyncio.run(upgrade.problem_of(Command(words, {"PDSERVE_POOL_TOKEN": "s"}))) == problem


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "MOST_S", 0.2)
    words = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    assert asyncio.run(upgrade.problem_of(Command(words))) == "its upgrade was not done within 0 s"
    assert asyncio.run(upgrade.problem_of(Command(("/nowhere",)))) == "/nowhere: No such file or directory"
