"""What a pool client's configuration refuses."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.settings.config_file import build_config


def test_a_certificate_without_an_authority_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls\.ca is needed"):
        build_config(PoolClientConfig, {"tls": {"certificate": "/c", "key": "/k"}}, source="f")
