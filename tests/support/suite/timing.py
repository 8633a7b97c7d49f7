"""Hooks that say at the end of a run how long the tests of each folder took, and which took too long."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.selection import over_their_bounds

SHOWN_S = 2.0
PROCESSOR_S = "processor seconds"
_before_s = pytest.StashKey[float]()


def processor_s() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_before_s] = processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROCESSOR_S, processor_s() - item.stash[_before_s]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A folder's time holds set-up and teardown of its tests, and that of the folders within it."""
    taken_s: Counter[str] = Counter()
    used_s: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            processor = sum(value for name, value in report.user_properties if name == PROCESSOR_S)
            for folder in list(Path(report.nodeid.partition("::")[0]).parents)[:-1]:
                taken_s[str(folder)] += report.duration
                used_s[str(folder)] += processor if report.when == "teardown" else 0.0
    if not taken_s:
        return
    late = {} if config.getoption("--all") else over_their_bounds(taken_s)
    terminalreporter.section("seconds of each folder, and processor seconds")
    for folder, seconds in sorted(taken_s.items()):
        if seconds >= SHOWN_S or folder in late:
            bound = f"  more than its bound of {late[folder]:.0f} s" if folder in late else ""
            colour = {"yellow": True} if bound else {}
            terminalreporter.line(f"{seconds:8.1f} {used_s[folder]:8.1f}  {folder}{bound}", **colour)
