"""The whole suite: which tests run, their order, examples of property tests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Iterator

import pytest
import uvloop
from hypothesis import settings

pytest_plugins = ["pytester", "tests.support.suite.chosen"]

HANGS_S = 60
"""How long an asynchronous test may take that has no `timeout` mark."""

# how long an example takes says more about what else the machine does than about the code; what lands is
# judged by the same examples each time, new ones are looked for in every other run
settings.register_profile("pdserve", deadline=None, derandomize="PDSERVE_SAME_EXAMPLES" in os.environ)
settings.load_profile("pdserve")


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """The handlers and level of the root logger are put back after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An asynchronous test runs on an event loop of its own, of the router's kind. One that hangs fails."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    mark = pyfuncitem.get_closest_marker("timeout")
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    uvloop.run(asyncio.wait_for(pyfuncitem.obj(**arguments), mark.args[0] if mark else HANGS_S))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests after the short ones; where several run at a time before them, lest one is left alone with a
    long file at the end. Tests of the shared cluster last: its four SGLang servers run from the first of them
    to the end, and no other server may start beside them on a small machine.
    """
    several = "PYTEST_XDIST_WORKER" in os.environ

    def place(item: pytest.Item) -> tuple[bool, bool]:
        is_long = item.get_closest_marker("long") is not None
        return "cluster" in getattr(item, "fixturenames", ()), is_long != several

    items.sort(key=place)
