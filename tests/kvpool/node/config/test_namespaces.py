"""Namespaces and tokens in a node's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.node.admission import rules_of
from pdserve.kvpool.node.config.node import PoolNodeConfig, with_secrets
from pdserve.security.tokens import digest
from pdserve.settings.config_file import load_config

ROOT, WRITER, KEEPER = "the-nodes-admin-token", "a-token-to-write", "a-token-to-administer"
SIZES = {"capacity_bytes": 1 << 30, "admin_token": ROOT}


def load(tmp_path: Path, text: str, **overrides: Any) -> PoolNodeConfig:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return load_config(PoolNodeConfig, path, SIZES | overrides)


def test_a_file_with_namespaces_becomes_rules(tmp_path: Path) -> None:
    (tmp_path / "write").write_text(f"{WRITER}\n")
    text = f"""
        [namespace_defaults]
        quota_bytes = "512MiB"
        [[namespaces]]
        name = "model@1"
        media = "dram"
        policy = "lfu"
        ttl_s = 60.0
        quota_bytes = "256MiB"
        operations_s = 100.0
        bytes_s = "2GB"
        weight = 3.0
        read_token = "sha256:{digest("r")}"
        write_token_file = "{tmp_path}/write"
        admin_token = "{KEEPER}"
    """
    rules = rules_of(load(tmp_path, text))
    assert rules.admin_token == digest(ROOT)
    assert rules.defaults.quota_bytes == 512 << 20
    found = rules.named["model@1"]
    assert (found.media, found.policy, found.ttl_s, found.weight) == ("dram", "lfu", 60.0, 3.0)
    assert (found.quota_bytes, found.operations_s, found.bytes_s) == (256 << 20, 100.0, 2e9)
    tokens = (found.read_token, found.write_token, found.admin_token)
    assert tokens == (digest("r"), digest(WRITER), digest(KEEPER))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('quota_bytes = "2GiB"', r"namespace 'a': quota_bytes is 2,147,483,648, and this node has 1,07"),
        ('quota_bytes = "2 pages"', "'2 pages' is not a size"),
        ('policy = "lfru"', "(lfu|lru)"),
        ("operations_s = -1.0", "operations_s"),
        ("weight = 0.0", "weight"),
        ("copies = 17", "copies"),
        ('media = "tape"', "media"),
        ('read_token = "sha256:12"', "64 hexadecimal digits"),
        ('read_token = "fifteen-letters"', "read_token must be 16 characters or more"),
        ('read_token_file = "/nowhere/t"', "/nowhere/t cannot be read"),
        ('read_token = "x"\nread_token_file = "/nowhere/t"', "keep one"),
        ('quota = "1GiB"', "quota"),
        ('[[namespaces]]\nname = "a"', "different names"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        rules_of(load(tmp_path, f'[[namespaces]]\nname = "a"\n{table}'))
    assert "\n" not in str(error.value)


def test_tokens_of_namespaces_need_an_administrator_of_the_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no admin_token"):
        rules_of(
            load(tmp_path, '[[namespaces]]\nname = "a"\nread_token = "a-token-to-read-it"', admin_token="")
        )


def test_an_empty_token_file_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        rules_of(load(tmp_path, "", admin_token="", admin_token_file=str(tmp_path / "empty")))


@pytest.mark.parametrize("given", ["a", "fifteen-letters"])
def test_a_token_that_could_be_guessed_is_refused_wherever_it_is_given(given: str, tmp_path: Path) -> None:
    (tmp_path / "short").write_text(f"{given}\n")
    file = str(tmp_path / "short")
    for options in ({"admin_token": given}, {"admin_token": "", "admin_token_file": file}):
        with pytest.raises(ConfigError, match="admin_token must be 16 characters or more"):
            rules_of(load(tmp_path, "", **options))
    with pytest.raises(ConfigError, match="admin_token must be 16 characters or more"):
        rules_of(with_secrets(load(tmp_path, "", admin_token=""), {"PDSERVE_POOL_ADMIN_TOKEN": given}))
    for options in ({"cluster": {"token": given}}, {"cluster": {"token_file": file}}):
        with pytest.raises(ConfigError, match=r"cluster\.token must be 16 characters or more"):
            with_secrets(load(tmp_path, "", **options), {})
    with pytest.raises(ConfigError, match=r"cluster\.token must be 16 characters or more"):
        with_secrets(load(tmp_path, ""), {"PDSERVE_POOL_CLUSTER_TOKEN": given})
