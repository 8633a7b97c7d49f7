"""A node of this process for tests of the threads' client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kvpool.faulty import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    """One node; at the end its books are in order and nothing is held."""
    with Pool(nodes=1) as pool:
        yield pool
