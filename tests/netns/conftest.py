"""A pool node on one host and a client on another, over a network that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.netns.field import FarNode, Field
from tests.support.netns.lab import lab


@pytest.fixture(scope="module", params=["ucx", "tcp"])
def whole_field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    directory = tmp_path_factory.mktemp("netns")
    with ExitStack() as stack:
        network = stack.enter_context(lab("far", "near"))
        node = FarNode(network, directory, trusted=request.param == "ucx")
        stack.callback(node.close)
        node.await_ready()
        made = Field(network, node, directory)
        stack.callback(lambda: made.client.close())
        yield made


@pytest.fixture
def field(whole_field: Field) -> Field:
    """One for all, so what a test does to it must not be felt by the next."""
    whole_field.get_ready()
    return whole_field
