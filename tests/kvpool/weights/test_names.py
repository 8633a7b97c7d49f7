"""Names of models and URLs of pools."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.weights.names import ModelName, is_pool_url, parse_model, parse_url


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("qwen3-8b", ModelName("qwen3-8b", "main")),
        ("qwen3-8b@2", ModelName("qwen3-8b", "2")),
        ("Qwen3_8.b@v1.2-rc", ModelName("Qwen3_8.b", "v1.2-rc")),
    ],
)
def test_a_revision_is_main_unless_it_is_named(text: str, model: ModelName) -> None:
    assert parse_model(text) == model
    assert parse_model(str(model)) == model


@pytest.mark.parametrize(
    "text",
    ["", "@", "a@", "@b", "a/b", "..", ".hidden", "a@..", "a b", "a\n", "a@b@c", "ä", "x" * 97, "a:b", "-a"],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no NAME or NAME@REV"):
        parse_model(text)


@pytest.mark.parametrize(
    ("url", "pool", "address"),
    [
        ("pdserve://pool/demo@2", "pool", None),
        ("pdserve://10.0.0.5:7100/demo@2", "10.0.0.5:7100", "tcp:10.0.0.5:7100"),
        ("pdserve://unix:/run/pool0.sock/demo@2", "unix:/run/pool0.sock", "unix:/run/pool0.sock"),
    ],
)
def test_a_url_names_a_pool_by_its_name_or_by_a_node(url: str, pool: str, address: str | None) -> None:
    assert is_pool_url(url)
    found = parse_url(url)
    assert (found.pool, found.address, found.model) == (pool, address, ModelName("demo", "2"))


@pytest.mark.parametrize(
    "url", ["pdserve://", "pdserve://pool", "pdserve:///demo", "pdserve://a b/demo", "/demo"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="pdserve://POOL/NAME"):
        parse_url(url)


def test_a_url_with_a_bad_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no NAME or NAME@REV"):
        parse_url("pdserve://pool/demo@")
