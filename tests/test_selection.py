"""Which tests a run takes, and what it says of those that it does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import selection
from tests.selection import RISKS, at_risk, is_taken, over_their_bounds
from tests.support.suite import timing
from tests.support.suite.chosen import changed_files

ROOT = Path(__file__).parent.parent

TESTS = """
import pytest

@pytest.mark.extended
def test_long(): pass

def test_short(): pass
"""


def test_every_path_of_the_tables_is_there() -> None:
    named = {*RISKS, *(path for tests in RISKS.values() for path in tests)}
    assert sorted(path for path in {*named, *selection.BOUNDS_S} if not (ROOT / path).exists()) == []


def test_the_fast_folders_may_take_nine_minutes_of_two_processes_in_all() -> None:
    fast_s = sum(bound for folder, bound in selection.BOUNDS_S.items() if folder != "tests/e2e")
    assert fast_s <= 2 * 9 * 60


@pytest.mark.parametrize(
    ("changed", "path", "runs"),
    [
        ("pdserve/kvpool/hicache/backend.py", "tests/e2e/test_mooncake.py", True),
        ("pdserve/kvpool/hicache/backend.py", "tests/router/test_x.py", False),
        ("pdserve/pages.py", "tests/kvpool/test_x.py", True),
        ("pdserve/pages.pyi", "tests/kvpool/test_x.py", False),
        ("docs/index.md", "tests/docs/test_pages.py", False),
        ("tests/support/e2e/warm.py", "tests/e2e/test_mooncake.py", False),
    ],
)
def test_a_change_brings_the_extended_tests_that_stand_beside_it(changed: str, path: str, runs: bool) -> None:
    assert is_taken(path, at_risk({changed, "README.md"})) == runs


def test_a_folder_over_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "BOUNDS_S", {"tests/up": 10.0, "tests/security": 10.0, "tests/docs": 10.0})
    assert over_their_bounds({"tests/up": 11.0, "tests/security": 9.0}) == {"tests/up": 10.0}


def test_what_a_branch_changed_is_found_with_what_is_not_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    assert changed_files(tmp_path) == set()  # nobody's checkout
    git("init", "--initial-branch=main")
    write("old", "1")
    write("moved", "1")
    git("add", ".")
    git("commit", "--message=one")
    assert changed_files(tmp_path) == set()
    git("checkout", "-b", "branch")
    git("mv", "moved", "to")
    git("commit", "--message=two")
    write("old", "2")
    write("new", "1")
    assert changed_files(tmp_path) == {"moved", "to", "old", "new"}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A checkout with a suite of two tests, one of them extended."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    plugins = "-p xdist.plugin -p tests.support.suite.chosen -p tests.support.suite.timing"
    pytester.makeini(f"[pytest]\naddopts = {plugins}\nmarkers =\n    extended: for this test")
    pytester.mkdir("tests")
    (pytester.path / "tests/test_x.py").write_text(TESTS)
    return pytester


@pytest.mark.parametrize("several", [[], ["-n", "1"]])
def test_a_run_says_which_tests_it_left_out(suite: pytest.Pytester, several: list[str]) -> None:
    result = suite.runpytest_inprocess(*several, "tests")
    result.stdout.fnmatch_lines(
        ["*1 extended tests left out: launch/test.sh --all runs them*", "tests/test_x.py 1", "*1 passed*"]
    )


@pytest.mark.parametrize("words", [["--all", "tests"], ["tests/test_x.py"], ["tests/test_x.py::test_long"]])
def test_extended_tests_run_when_all_do_and_when_they_are_named(
    suite: pytest.Pytester, words: list[str]
) -> None:
    result = suite.runpytest_inprocess(*words)
    result.stdout.fnmatch_lines(["extended tests of tests*", "*passed*"])
    result.stdout.no_fnmatch_line("*left out*")


def test_a_run_says_how_long_a_folder_took(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHOWN_S", 0.0)
    monkeypatch.setattr(selection, "BOUNDS_S", {"tests": 0.0})
    said = suite.runpytest_inprocess("tests").stdout
    said.fnmatch_lines(["*seconds of each folder*", "* 0.0 * tests  more than its bound of 0 s"])
