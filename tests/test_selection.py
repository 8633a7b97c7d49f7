"""Which tests a run takes, and what it says of those that it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.selection import RISKS, at_risk, is_taken
from tests.support.suite.chosen import changed_files

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.extended
def test_long(): pass

def test_short(): pass
"""


def test_every_path_of_the_table_is_there() -> None:
    named = {*RISKS, *(path for tests in RISKS.values() for path in tests)}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize(
    ("changed", "path", "runs"),
    [
        ("pdserve/kvpool/hicache/backend.py", "tests/e2e/test_mooncake.py", True),
        ("pdserve/kvpool/hicache/backend.py", "tests/router/test_x.py", False),
        ("pdserve/pages.pyi", "tests/kvpool/test_x.py", False),
        ("docs/index.md", "tests/docs/test_pages.py", False),
    ],
)
def test_a_change_brings_the_extended_tests_that_stand_beside_it(changed: str, path: str, runs: bool) -> None:
    assert is_taken(path, at_risk({changed, "README.md"})) == runs


def test_what_a_branch_changed_is_found_with_what_is_not_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    assert changed_files(tmp_path) == set()  # nobody's checkout
    git("init", "--initial-branch=main")
    for name in ("old", "moved"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--message=one")
    assert changed_files(tmp_path) == set()
    git("checkout", "-b", "branch")
    git("mv", "moved", "to")
    git("commit", "--message=two")
    (tmp_path / "old").write_text("2")
    (tmp_path / "new").write_text("1")
    assert changed_files(tmp_path) == {"moved", "to", "old", "new"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tests"], ["*1 extended tests left out: launch/test.sh --all runs them*", "tests/test_x.py 1"]),
        (["-n", "1", "tests"], ["*1 extended tests left out*", "tests/test_x.py 1", "*1 passed*"]),
        (["--all", "tests"], ["extended tests of tests*", "*2 passed*"]),
        (["tests/test_x.py::test_long"], ["extended tests of tests*", "*1 passed*"]),
    ],
)
def test_extended_tests_run_when_all_do_or_are_named_and_else_are_said_to_be_left_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: list[str], says: list[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    plugins = "-p xdist.plugin -p tests.support.suite.chosen"
    pytester.makeini(f"[pytest]\naddopts = {plugins}\nmarkers =\n    extended: for this test")
    pytester.mkdir("tests")
    (pytester.path / "tests/test_x.py").write_text(TESTS)
    result = pytester.runpytest_inprocess(*words)
    result.stdout.fnmatch_lines(says)
    if "left out" not in says[0]:
        result.stdout.no_fnmatch_line("*left out*")
