"""Parts of tests that only the extended run takes."""

from __future__ import annotations

import os
from typing import Any

import pytest

VARIABLE = "PDSERVE_ALL_EXAMPLES"
"""Set while a run takes the extended tests (`--all`)."""


def extended(*values: Any) -> Any:
    """Values of a parametrized test that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.extended)


def examples(count: int) -> int:
    """How many examples a property test takes: so many with `--all`, a quarter of them in the default run."""
    return count if VARIABLE in os.environ else max(10, count // 4)
