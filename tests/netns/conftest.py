"""A pool node on one host and a client on another, over a network that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.netns.field import START_TIMEOUT_S, FarNode, Field, NearClient
from tests.support.netns.lab import lab


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    with ExitStack() as stack:
        network = stack.enter_context(lab("far", "near"))
        node = FarNode(network, tmp_path)
        stack.callback(node.close)
        node.await_ready()
        client = NearClient(network, node, tmp_path)
        stack.callback(client.close)
        assert client.do("connect", within_s=START_TIMEOUT_S / 2) == {"problems": []}
        yield Field(network, node, client)
