from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.addresses import parse_base_url
from pdserve.router.config.router import RouterConfig
from pdserve.settings.config_file import load_config, options

EXAMPLE = Path(__file__).parents[3] / "launch" / "router.toml"


def test_the_example_shows_every_option_with_its_default() -> None:
    config = load_config(RouterConfig, EXAMPLE, {})
    assert msgspec.structs.replace(config, prefill=(), decode=()) == RouterConfig()
    text = EXAMPLE.read_text()
    for option in options(RouterConfig):
        assert option.key.rpartition(".")[2] + " = " in text, option.key


def test_every_option_is_described() -> None:
    assert all(option.description for option in options(RouterConfig))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"prefill": ["http://a:1"]}, "'decode' is empty"),
        ({"decode": ["http://a:1"], "agg": ["http://a:1/"]}, "listed twice"),
        ({"decode": ["http://a:1"], "prefill_endpoints": ["/v1/chat"]}, "must be '/v1/chat/completions' or "),
        ({"decode": ["a:1"]}, "http://HOST:PORT"),
        ({"decode": ["ftp://a:1"]}, "http://HOST:PORT"),
        ({"decode": ["https://a:1"]}, "https://a:1 needs tls.ca"),
        ({"decode": ["http://a:1"], "tls.ca": "/ca"}, "http://a:1 has no TLS"),
        ({"tls.certificate": "/c", "tls.key": "/k"}, "needs tls.ca"),
        ({"tls.ca": "/a", "decode": ["https://a:1"], "agg": ["https://a:1"]}, "listed twice"),
        ({"decode": ["http://a:99999"]}, "http://a:99999"),
        ({"decode": ["http://10.0.0.256:1"]}, "http://10.0.0.256:1"),
        ({"decode": ["http://a..b:1"]}, "http://a..b:1"),
        ({"decode": ["http://a:0"]}, "port 0 is no port"),
        ({"decode": ["http://[::g]:1"]}, "http://[::g]:1"),
        ({"deadlines.prefil_s": 1.0}, "deadlines.prefill_s"),
        ({"deadlines.total_s": 0.0}, "total_s"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(overrides: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RouterConfig, None, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_base_urls() -> None:
    assert parse_base_url("http://h:8") == ("h", 8)
    assert parse_base_url("https://h") == ("h", 443)
    assert parse_base_url("http://[::1]:8/") == ("::1", 8)
