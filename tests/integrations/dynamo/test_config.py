"""Where a worker of Dynamo hears its own schedulers' events."""

from __future__ import annotations

import pytest

from pdserve.integrations.dynamo.config import DynamoConfig, DynamoEngine


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:5560", "127.0.0.1"),
        ("tcp://[::1]:5560", "::1"),
        ("tcp://*:5560", ""),
        ("tcp://0.0.0.0:5560", ""),
        ("tcp://[::]:5560", ""),
        ("", ""),
    ],
)
def test_events_are_heard_where_they_are_published(address: str, host: str) -> None:
    config = DynamoConfig(engine=DynamoEngine(model_path="m"), kv_events=address)
    assert config.kv_events_host == host
