"""The whole suite: examples of property tests, order of the tests, time of each folder."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# how long an example takes says more about what else the machine does than about the code; what lands is
# judged by the same examples each time, new ones are looked for in every other run
settings.register_profile("pdserve", deadline=None, derandomize="PDSERVE_SAME_EXAMPLES" in os.environ)
settings.load_profile("pdserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests after the short ones. Tests of the shared cluster last: its four SGLang servers run from the
    first of them to the end, and no other server may start beside them on a small machine.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return "cluster" in getattr(item, "fixturenames", ()), item.get_closest_marker("long") is not None

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long the tests of each folder took, set-up and teardown included. A folder's time holds that of the
    folders within it.
    """
    seconds: Counter[Path] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds.update(
                    dict.fromkeys(list(Path(report.nodeid.partition("::")[0]).parents)[:-1], report.duration)
                )
    if seconds:
        terminalreporter.section("seconds of each folder")
        for folder, taken_s in sorted(seconds.items()):
            terminalreporter.line(f"{taken_s:8.1f} {folder}")
