"""Debian packages that tests need: which are asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.debian import PROGRAMS, Program, is_there, main, needed

ROOT = Path(__file__).parents[1]
STARTS = {
    "etcd": r"support\.etcd_server import",
    "redis-server": r"router\.redis_server import",
    "promtool": r"promtool",
    "chromium": r"playwright\.sync_api",
}
"""Programs, and what the text of a test says that runs it."""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--all",), {program.package for program in PROGRAMS}),
        (("tests/security",), set()),
        (("tests/discovery/test_etcd_of_pools.py::test_x",), {"etcd-server"}),
        (("tests/e2e/test_exact_turns.py",), {"etcd-server", "redis-server", "libibverbs1"}),
        (("--fast", "tests/e2e"), set()),
        (("tests/contracts/test_launcher_contract.py",), {"openssh-server"}),
    ],
)
def test_packages_of_the_tests_that_are_selected_are_asked_for(
    words: tuple[str, ...], found: set[str]
) -> None:
    assert {program.package for program in needed(words)} == found


def test_every_path_of_the_table_is_there() -> None:
    paths = [path for program in PROGRAMS for path in (*program.tests, *program.extended)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", STARTS)
def test_the_table_names_every_test_that_starts_the_program(name: str) -> None:
    [program] = [program for program in PROGRAMS if program.name == name]
    for path in (ROOT / "tests").rglob("test_*.py"):
        relative = str(path.relative_to(ROOT))
        if re.search(STARTS[name], path.read_text()) and path != Path(__file__):
            assert program in needed([relative]), relative


def test_a_missing_package_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Program("no-such", "its-package", ("tests/security",))
    monkeypatch.setattr("tests.support.debian.PROGRAMS", (missing, Program("sh", "dash", ("tests",))))
    assert main(["tests/security"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "apt-get install --no-install-recommends its-package'" in said
    assert main(["tests/up"]) == 0
    assert [is_there(Program(name, "x")) for name in ("libc.so.6", "no.so.1")] == [True, False]


def test_it_needs_no_package_of_python() -> None:
    command = [sys.executable, "-S", "-m", "tests.support.debian", "tests/security"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
