"""Debian packages that tests need: which are asked for, and how they are installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.debian import PROGRAMS, Program, is_there, main, needed, no_service_starts

ROOT = Path(__file__).parents[1]
STARTS = {
    "etcd": r"support\.etcd_server import",
    "redis-server": r"router\.redis_server import",
    "promtool": r"promtool",
    "chromium": r"playwright\.sync_api",
}
"""Programs, and what the text of a test says that runs it."""


def packages(*words: str, whole: bool = False) -> set[str]:
    return {program.package for program in needed(words, whole=whole)}


def test_a_run_of_everything_needs_what_fails_without_it() -> None:
    assert {"etcd-server", "redis-server", "libibverbs1"} <= packages()
    assert "openssh-server" not in packages()


def test_a_whole_run_needs_what_its_tests_would_skip_without() -> None:
    assert packages("--all", whole=True) == {program.package for program in PROGRAMS}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("tests/security",), set()),
        (("tests/discovery", "-k", "x"), {"etcd-server"}),
        (("tests/discovery/test_etcd_of_pools.py::test_x",), {"etcd-server"}),
        (("tests/e2e/test_exact_turns.py",), {"etcd-server", "redis-server", "libibverbs1"}),
        (("--fast", "tests/e2e"), set()),
        (("tests/contracts/test_launcher_contract.py",), {"openssh-server"}),
    ],
)
def test_only_the_tests_that_are_named_are_asked_for(words: tuple[str, ...], found: set[str]) -> None:
    assert packages(*words) == found


def test_every_path_of_the_table_is_there() -> None:
    for program in PROGRAMS:
        for path in (*program.tests, *program.extended):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", STARTS)
def test_the_table_names_every_test_that_starts_the_program(name: str) -> None:
    [program] = [program for program in PROGRAMS if program.name == name]
    for path in (ROOT / "tests").rglob("test_*.py"):
        relative = str(path.relative_to(ROOT))
        if re.search(STARTS[name], path.read_text()) and path != Path(__file__):
            assert program in needed([relative], whole=False), relative


def test_a_missing_package_is_named_in_one_line_and_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.support.debian.PROGRAMS", (Program("no-such", "its-package", ("tests/security",)),)
    )
    assert main(["tests/security"], {}) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--install tests/security'" in said
    assert "sudo apt-get install its-package" in said
    assert main(["tests/up"], {}) == 0


@pytest.mark.parametrize(
    ("name", "there"), [("sh", True), ("no-such", False), ("libc.so.6", True), ("no.so.1", False)]
)
def test_commands_and_libraries_are_found(name: str, there: bool) -> None:
    assert is_there(Program(name, "x")) is there


def test_no_service_starts_while_packages_are_installed(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with no_service_starts(policy):
        assert subprocess.run([policy, "ssh", "start"], check=False).returncode == 101
    assert not policy.exists()


def test_a_policy_that_is_there_stays(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("own")
    with no_service_starts(policy):
        assert policy.read_text() == "own"
    assert policy.read_text() == "own"


def test_it_needs_no_package_of_python() -> None:
    command = [sys.executable, "-S", "-m", "tests.support.debian", "tests/security"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
