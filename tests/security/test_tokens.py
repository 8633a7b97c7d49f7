"""Secrets: given by file or environment, and never shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from docs.generate.product import CONFIGURED, options_of
from pdserve.discovery.config import EtcdConfig
from pdserve.discovery.etcd import _credentials
from pdserve.engine.sglang.storage import pool_storage
from pdserve.errors import ConfigError
from pdserve.kvpool.client.config import PoolClientConfig, with_pool_secrets
from pdserve.kvpool.hicache.backend import BackendSettings
from pdserve.kvpool.node.config import PoolNodeConfig, with_secrets
from pdserve.pages import KvGeometry
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import Secret, SecretFile, decode_secret, given_secret, reveal
from pdserve.settings.config_file import build_config, load_config
from tests.support.command import pdserve_here

TEXT = "canary-of-this-test"


class Held(msgspec.Struct, frozen=True):
    token: Secret


def test_a_secret_never_prints_itself(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(TEXT)
    logging.getLogger("t").warning("%s %r %s %s", secret, secret, Held(secret), {"a": [secret]})
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>9}", "%s" % secret, format(secret, ">30")]  # noqa: UP031
    assert TEXT not in " ".join([*shown, caplog.text, str(Held(secret)), f"{[secret]}"])
    with pytest.raises(TypeError):
        msgspec.json.encode(Held(secret))
    assert str(Secret("")) == ""
    assert reveal(secret) == TEXT
    assert type(reveal(secret)) is str


def test_a_secret_comes_from_text_or_file_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{TEXT}\n")
    assert given_secret(Secret("a"), "X", {"X": "b"}) == "a"
    assert given_secret(SecretFile(file), "X", {"X": "b"}) == TEXT
    assert given_secret(Secret(""), "X", {"X": "b"}) == "b"
    assert given_secret(Secret(""), "X", {"X": "b\r\n"}) == "b", "as in a file"
    assert given_secret(Secret(""), "X", {}) == ""
    with pytest.raises(TypeError, match="nobody has read"):
        reveal(SecretFile(file))


def test_the_secrets_of_pool_and_etcd_come_from_files_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT)
    table: dict[str, Any] = {"admin_token_file": str(file), "cluster": {"token_file": str(file)}}
    node = with_secrets(build_config(PoolNodeConfig, table, source="f"), {})
    assert (reveal(node.admin_token), reveal(node.cluster.token)) == (TEXT, TEXT)
    admin, cluster = "a-token-of-operators", "a-token-of-the-nodes"
    variables = {"PDSERVE_POOL_ADMIN_TOKEN": admin, "PDSERVE_POOL_CLUSTER_TOKEN": cluster}
    node = with_secrets(PoolNodeConfig(), variables)
    assert (reveal(node.admin_token), reveal(node.cluster.token)) == (admin, cluster)
    assert TEXT not in str(with_secrets(build_config(PoolNodeConfig, table, source="f"), {}))

    assert reveal(with_pool_secrets(PoolClientConfig(token=SecretFile(file)), {}).token) == TEXT
    assert reveal(with_pool_secrets(PoolClientConfig(), {"PDSERVE_POOL_TOKEN": "v"}).token) == "v"
    given = with_pool_secrets(PoolClientConfig(page_key=SecretFile(file)), {})
    assert reveal(given.page_key) == TEXT
    assert reveal(with_pool_secrets(PoolClientConfig(), {"PDSERVE_POOL_PAGE_KEY": TEXT}).page_key) == TEXT
    with pytest.raises(ConfigError, match="page_key must be 16 characters"):
        with_pool_secrets(PoolClientConfig(), {"PDSERVE_POOL_PAGE_KEY": "short"})

    etcd = build_config(EtcdConfig, {"username": "u", "password_file": str(file)}, source="f")
    assert _credentials(etcd) == {"name": "u", "password": TEXT}


def test_etcds_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_ETCD_PASSWORD", TEXT)
    assert _credentials(EtcdConfig(username="u")) == {"name": "u", "password": TEXT}


def test_what_sglang_is_told_of_the_pool_holds_no_secret() -> None:
    geometry = Mock(as_dict=dict)
    config = PoolClientConfig(token=Secret(TEXT), page_key=Secret(TEXT))
    assert TEXT not in str(pool_storage(config, "n", geometry))


def test_sglangs_processes_are_told_where_the_certificates_are() -> None:
    tls = TlsConfig(certificate=Path("/c.pem"), key=Path("/c.key"), ca=Path("/ca.pem"))
    geometry = KvGeometry(
        model="m", dtype="d", kv_dtype="d", page_size="4", layout="page_first", tp_size="1", pp_size="1"
    )
    told = pool_storage(PoolClientConfig(tls=tls), "n", geometry)["pdserve"]
    assert msgspec.convert(told, BackendSettings, dec_hook=decode_secret).pool.tls == tls


@pytest.mark.parametrize("one", CONFIGURED, ids=lambda one: one.anchor)
def test_every_option_that_is_a_secret_has_a_flag_of_its_file_alone(one: Any) -> None:
    found = {option.key: option for option in options_of(one.struct)}
    endings = ("token", "password", "secret", "admin.key")
    for key, option in found.items():
        if key.endswith(endings) and option.type_name != "float":
            assert option.type_name == "secret", key
            assert option.kind == ("file-only" if "[]" in key else "secret"), key
            if "namespace" not in key:
                assert "also from PDSERVE_" in option.description


def test_a_secret_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PoolNodeConfig, None, {"cluster.token": 987654321})
    assert "987654321" not in str(caught.value)
    assert "'cluster.token' must be a string" in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ("pool", "serve", "--cluster.token", TEXT),
        ("pool", "status", "unix:/x", "--token", TEXT),
        ("pool", "ns", "create", "unix:/x", "n", "--read-token", TEXT),
        ("router", "--admin.key", TEXT),
        ("top", "--key", TEXT),
        ("agg", "--cluster-token", TEXT),
        ("doctor", "--token", TEXT),
    ],
)
def test_no_command_takes_a_secret_as_a_word(words: tuple[str, ...]) -> None:
    done = pdserve_here(*words)
    assert done.returncode != 0
    assert TEXT not in done.stdout + done.stderr
    assert "No such option" in done.stderr or "@FILE" in done.stderr
