"""Which clients a node lets in, and how they move pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.node.admission import Admission, check_open, rules_of
from pdserve.kvpool.node.config.cluster import ClusterConfig
from pdserve.kvpool.node.config.namespaces import NamespaceConfig, NamespaceDefaults
from pdserve.kvpool.node.config.node import PoolNodeConfig, TcpConfig, UcxConfig, with_secrets
from pdserve.kvpool.node.serving.places import Places
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, key_id, without_token
from pdserve.kvpool.transports.session import make_hello
from pdserve.security.failed_logins import BURST
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import digest
from pdserve.settings.config_file import load_config

TOKEN = "the-token-of-the-operator"
PLAIN, TCP = TlsConfig(), TcpConfig()
HERE, LOOPBACK, FAR = "uid 0", "127.0.0.1", "192.0.2.9"


def path_of(
    address: str,
    data_path: m.DataPathChoice = "ucx",
    *,
    token: str = "",
    admin: str = "",
    tls: TlsConfig = PLAIN,
    tcp: TcpConfig = TCP,
    **ucx: Any,
) -> m.DataPathName | m.Fault:
    config = PoolNodeConfig(ucx=UcxConfig(**ucx), tcp=tcp, admin_token=admin, tls=tls)
    known = {key_id(digest(admin)): digest(admin)} if admin else {}
    admission = Admission(
        config, rules_of(config), 1, Places(8), lambda: View(0, 0, []), lambda named: known.get(named, "")
    )
    hello = make_hello("w", "elsewhere", data_path, token)
    proved = msgspec.structs.replace(hello, key_id=key_id(digest(token))) if token else hello
    return admission.choose_path(1, address, proved)


@pytest.mark.parametrize("address", [HERE, LOOPBACK, "::ffff:127.0.0.1"])
def test_clients_of_this_host_may_use_ucx(address: str) -> None:
    assert path_of(address) == "ucx"


@pytest.mark.parametrize("address", ["::1", "2001:db8::1"])
def test_clients_that_come_by_ipv6_get_tcp_since_ucxx_listens_on_ipv4_alone(address: str) -> None:
    assert path_of(address, "auto", trusted_network=True) == "tcp"
    refused = path_of(address, trusted_network=True)
    assert isinstance(refused, m.Fault)
    assert "over IPv6" in refused.message
    assert "data_path = 'tcp'" in refused.message


@pytest.mark.parametrize("address", [FAR, "::ffff:192.0.2.9", "unknown"])
def test_clients_of_other_hosts_may_use_ucx_in_a_trusted_network_only(address: str) -> None:
    refused = path_of(address)
    assert isinstance(refused, m.Fault)
    assert "ucx.trusted_network = true" in refused.message
    assert path_of(address, trusted_network=True) == "ucx"


@pytest.mark.parametrize("address", [HERE, FAR])
def test_where_tokens_are_in_use_ucx_is_for_those_with_one(address: str) -> None:
    for token in ("", "a guess"):
        refused = path_of(address, token=token, admin=TOKEN, trusted_network=True)
        assert isinstance(refused, m.Fault)
        assert "token" in refused.message
    assert path_of(address, token=TOKEN, admin=TOKEN, trusted_network=True) == "ucx"


@pytest.mark.parametrize(("trusted", "path"), [(False, "tcp"), (True, "ucx")])
def test_other_hosts_get_tcp_by_themselves_where_the_network_is_not_trusted(trusted: bool, path: str) -> None:
    assert path_of(FAR, "auto", trusted_network=trusted) == path
    assert path_of(FAR, "auto", trusted_network=trusted, enabled=False) == "tcp"
    assert path_of(FAR, "tcp", trusted_network=trusted) == "tcp"


def test_a_node_without_ucx_gives_tcp_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.node.admission.is_installed", lambda extra: False)
    assert path_of(FAR, "auto", trusted_network=True) == "tcp"
    refused = path_of(FAR, "ucx", trusted_network=True)
    assert isinstance(refused, m.Fault)
    assert "pip install 'pdserve[ucx]'" in refused.message


def test_pages_of_clients_that_come_by_tls_go_by_tls_unless_they_ask_for_ucx() -> None:
    tls = TlsConfig(certificate=Path("/c"), key=Path("/k"), ca=Path("/a"))
    assert path_of(FAR, "auto", trusted_network=True, tls=tls) == "tcp"
    assert path_of(FAR, "ucx", trusted_network=True, tls=tls) == "ucx"
    assert path_of(FAR, "auto", trusted_network=True, tls=tls, tcp=TcpConfig(enabled=False)) == "ucx"
    assert path_of(HERE, "auto", trusted_network=True, tls=tls) == "ucx", "its ports are on loopback"


class Door:
    """Who comes to a node with an operator's token, at a time of the test's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        config = PoolNodeConfig(name="n", admin_token=TOKEN, cluster=ClusterConfig(token="the-nodes-token"))
        known = {key_id(digest(TOKEN)): digest(TOKEN)}
        view = View(0, 0, [])
        self.admission = Admission(
            config,
            rules_of(config),
            1,
            Places(8),
            lambda: view,
            lambda named: known.get(named, ""),
            self._clock,
        )

    def _clock(self) -> float:
        return self.now_s

    def names(self, token: str, address: str = FAR, node: str = "") -> str:
        """The code of the refusal; empty where the node goes on."""
        asked = make_hello("w", "elsewhere", "none", token)
        named = without_token(msgspec.structs.replace(asked, node=node), bytes(NONCE_BYTES))
        answer = self.admission.challenge(address, named)
        return answer.code if isinstance(answer, m.Fault) else ""

    def sends(self, token: str, address: str = FAR) -> str:
        """In clear, which no client of ours does."""
        answer = self.admission.choose_path(1, address, make_hello("w", "elsewhere", "none", token))
        return answer.code if isinstance(answer, m.Fault) else ""


@pytest.mark.parametrize("how", ["names", "sends", "names the nodes'", "proves wrongly"])
def test_who_tries_tokens_is_told_nothing_more_after_some(how: str) -> None:
    door = Door()
    for number in range(BURST):
        match how:
            case "names":
                assert door.names(f"guess {number}") == "bad_token"
            case "sends":
                assert door.sends(f"guess {number}") == "bad_token"
            case "names the nodes'":
                assert door.names(f"guess {number}", node="b") == "bad_token"
            case _:
                door.admission.wrong_proof(FAR)
    for token in ("one more", TOKEN):
        assert door.names(token) == "too_many_guesses"
    assert door.names("the-nodes-token", node="b") == "too_many_guesses"
    assert door.names(TOKEN, address="192.0.2.10") == ""
    door.now_s += 1.0
    assert door.names(TOKEN) == ""


def test_a_client_that_proved_its_token_comes_again_from_an_address_that_guesses() -> None:
    door = Door()
    shown = make_hello("w", "elsewhere", "none", TOKEN)
    door.admission.connected(1, FAR, msgspec.structs.replace(shown, token=TOKEN), "none")
    for number in range(10 * BURST):
        door.names(f"guess {number}")
    assert door.names(TOKEN) == ""
    assert door.sends(TOKEN) == "bad_token"


def test_a_node_without_ucx_says_so() -> None:
    refused = path_of(HERE, enabled=False)
    assert isinstance(refused, m.Fault)
    assert "has UCX off" in refused.message


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (UcxConfig(), {"NET_DEVICES": "lo"}),
        (UcxConfig(trusted_network=True), {}),
        (UcxConfig(trusted_network=True, devices="mlx5_0:1"), {"NET_DEVICES": "mlx5_0:1"}),
        (UcxConfig(options={"NET_DEVICES": "eth9"}), {"NET_DEVICES": "eth9"}),
    ],
)
def test_ucx_listens_on_loopback_unless_told_otherwise(config: UcxConfig, settings: dict[str, str]) -> None:
    assert config.settings == settings


GUARDED: dict[str, Any] = {
    "listen": ["unix:/s", "tcp:0.0.0.0:7700"],
    "admin_token": TOKEN,
    "cluster": ClusterConfig(advertise="tcp:a:1", token=TOKEN),
    "namespace_defaults": NamespaceDefaults(read_token=TOKEN),
}


@pytest.mark.parametrize(
    ("open_", "missing"),
    [
        ({"admin_token": "", "namespace_defaults": NamespaceDefaults()}, "no admin_token"),
        ({"cluster": ClusterConfig(advertise="tcp:a:1")}, "no cluster.token"),
        ({"namespace_defaults": NamespaceDefaults(write_token=TOKEN)}, "no namespace_defaults.read_token"),
        ({"namespaces": [NamespaceConfig(name="n", write_token=TOKEN)]}, "no read_token of namespace 'n'"),
    ],
)
def test_a_node_that_other_hosts_reach_needs_every_token(open_: dict[str, Any], missing: str) -> None:
    guarded = PoolNodeConfig(**GUARDED)
    assert check_open(guarded, rules_of(guarded)) == []
    config = PoolNodeConfig(**{**GUARDED, **open_})
    with pytest.raises(ConfigError) as error:
        check_open(config, rules_of(config))
    assert missing in str(error.value)
    assert "tcp:0.0.0.0:7700" in str(error.value)
    insecure = PoolNodeConfig(**{**GUARDED, **open_, "insecure": True})
    assert missing.removeprefix("no ") in check_open(insecure, rules_of(insecure))


@pytest.mark.parametrize("listen", ["unix:/s", "tcp:127.0.0.1:7700", "tcp:[::1]:7700", "tcp:localhost:1"])
def test_a_node_of_this_host_alone_needs_no_token(listen: str) -> None:
    config = PoolNodeConfig(listen=[listen])
    assert check_open(config, rules_of(config)) == []


def test_the_example_of_a_node_that_other_hosts_reach_has_every_token(tmp_path: Path) -> None:
    example = (Path(__file__).parents[3] / "launch/pool-node.toml").read_text()
    (tmp_path / "node.toml").write_text(example.replace("/etc/pdserve", str(tmp_path)))
    for name in ("pool-admin", "pool-cluster", "pool"):
        (tmp_path / f"{name}-token").write_text(f"{TOKEN}-{name}")
    loaded = load_config(PoolNodeConfig, tmp_path / "node.toml", {"cluster.advertise": "tcp:pool-a:7700"})
    config = with_secrets(loaded, {})
    assert check_open(config, rules_of(config)) == []
