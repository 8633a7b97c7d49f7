"""What concerns the whole suite."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared cluster last: its four SGLang servers run from the first of them to the end, and no
    other server may start beside them on a small machine.
    """
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))
