"""Hooks that take the tests of a run as tests/selection.py says, and say what was left out."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.selection import at_risk, is_taken
from tests.support.suite.extended import VARIABLE

_wanted = pytest.StashKey[dict[str, str]]()
_left_out = pytest.StashKey[Counter[str]]()


def changed_files(root: Path) -> set[str]:
    """What differs from the commit at which this branch left `main`; nothing where that is not known."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if done.returncode == 0 else []

    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    untracked = git("ls-files", "--others", "--exclude-standard")
    return {*(git("diff", "--name-only", "--no-renames", *base) if base else ()), *untracked}


def named_paths(words: list[str], root: Path, directory: Path) -> dict[str, str]:
    """Files of tests that the command line names."""
    found = {}
    for word in words:
        path = (directory / word.partition("::")[0]).resolve()
        if path.is_relative_to(root):
            name = str(path.relative_to(root))
            if path.is_file():
                found[name] = "the command line"
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked `extended`, too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = Counter()
    if (given := getattr(config, "workerinput", None)) is not None:
        config.stash[_wanted] = given["wanted"]
    elif config.getoption("--all"):
        config.stash[_wanted] = {"tests": "--all"}
        os.environ[VARIABLE] = "1"  # also for the processes that run tests
    else:
        changed = set() if "CI" in os.environ else changed_files(config.rootpath)
        named = named_paths(config.args, config.rootpath, config.invocation_params.dir)
        config.stash[_wanted] = {**at_risk(changed), **named}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist: the processes that run tests are told what the first one found."""
    node.workerinput["wanted"] = node.config.stash[_wanted]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"extended tests of {path}: {why}" for path, why in config.stash[_wanted].items()]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, taken, left = config.stash[_wanted], [], []
    for item in items:
        path = item.nodeid.partition("::")[0]
        extended = item.get_closest_marker("extended") is not None
        (left if extended and not is_taken(path, wanted) else taken).append(item)
    items[:] = taken
    config.hook.pytest_deselected(items=left)
    config.stash[_left_out] = Counter(item.nodeid.partition("::")[0] for item in left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """To the process that reports, from one that runs tests."""
    if (given := getattr(session.config, "workeroutput", None)) is not None:
        given["left_out"] = dict(session.config.stash[_left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist. All processes collect the same tests."""
    node.config.stash[_left_out] |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash[_left_out]:
        terminalreporter.section(f"{left.total()} extended tests left out: launch/test.sh --all runs them")
        terminalreporter.line(", ".join(f"{path} {count}" for path, count in sorted(left.items())))
