"""A node's configuration: what it may say, what is refused and in which words, and its tokens as rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.node.admission import check_open, rules_of
from pdserve.kvpool.node.config import (
    ClusterConfig,
    EventsConfig,
    NamespaceConfig,
    NamespaceDefaults,
    PoolNodeConfig,
    UcxConfig,
    with_secrets,
)
from pdserve.security.tokens import digest
from pdserve.settings.config_file import load_config
from pdserve.sizes import parse_bytes

EXAMPLE = Path(__file__).parents[3] / "launch" / "pool-node.toml"
TOKEN, WRITER, KEEPER = "the-token-of-the-operator", "a-token-to-write", "a-token-to-administer"


def load(tmp_path: Path, text: str, **overrides: Any) -> PoolNodeConfig:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return load_config(PoolNodeConfig, path, {"capacity_bytes": 1 << 30, "admin_token": TOKEN, **overrides})


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("4GiB", 4 << 30), ("512 mib", 512 << 20), ("1.5KB", 1500)]
    + [(text, None) for text in ("", "GiB", "4GiX", "-1", "4 GiB more", "1e9")],
)
def test_sizes_are_read_in_the_usual_units(text: int | str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity_bytes": 1 << 10}, "at least 16KiB"),
        ({"page_bytes": 2 << 30}, "page_bytes must be at most capacity_bytes and 2GiB"),
        ({"page_bytes": 3 << 30, "capacity_bytes": 8 << 30}, "page_bytes must be at most"),
        ({"moving": {"bytes_s": "fast"}}, "'moving.bytes_s': 'fast' is not a size"),
        ({"moving": {"bytes_s": -1}}, "'moving.bytes_s' must be int >= 0, found -1"),
        ({"tiers": [{"kind": "ssd", "path": "/x", "capacity_bytes": "0"}]}, "'tiers[0].capacity_bytes'"),
        ({"tiers": [{"kind": "ssd", "path": "/x", "capacity_bytes": "1GiB"}] * 2}, "different paths"),
        ({"listen": []}, "listen"),
        ({"name": "../x"}, "name"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"max_connections": 0}, "max_connections"),
        ({"log_format": "xml"}, "log_format"),
        ({"huge_pages": "2MiB", "capacity_bytes": 17 << 20}, "multiple of 2MiB"),
        ({"huge_pages": "1GiB", "capacity_bytes": 1500 << 20}, "multiple of 1GiB"),
        ({"huge_pages": "3MiB"}, "huge_pages"),
        ({"numa_node": -1}, "numa_node"),
        ({"metrics": "9100"}, "host:port"),
        ({"metrics": "host:"}, "host:port"),
        ({"metrics": "http://h:1"}, "host:port"),
        ({"metrics": ":1"}, "host:port"),
        ({"cluster": {"peers": ["a:1"]}}, '"a:1" is not "unix:/path"'),
        ({"cluster": {"advertise": "tcp:x"}}, '"tcp:x" is not'),
        ({"cluster": {"peers": ["dns+tcp:a"]}}, "is not of the form dns"),
        ({"cluster": {"peers": ["dns+tcp:a:1"]}, "tls": {"ca": "/ca"}}, "certificates name hosts"),
        ({"cluster": {"peers": ["tcp:a:1"]}, "listen": ["tcp:0.0.0.0:7700"]}, "cluster.advertise is needed"),
        ({"tls": {"certificate": "/c", "key": "/k"}}, "tls.ca is needed beside tls.certificate"),
        ({"events": {"address": "127.0.0.1:5557"}}, "must be like"),
        ({"events": {"address": "tcp://127.0.0.1"}}, "must be like"),
        ({"events": {"address": "tcp://127.0.0.1:99999"}}, "must be like"),
        ({"events": {"address": "inproc://x"}}, "must be like"),
        ({"capactiy_bytes": 1}, "capacity_bytes"),
    ],
)
def test_contradictions_are_config_errors_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(PoolNodeConfig, None, options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_sets_every_option_and_a_nodes_weight_is_its_capacity_in_whole_slabs(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(
        'name = "a"\nlisten = ["unix:/s", "tcp:127.0.0.1:1"]\ncapacity_bytes = "64MiB"\n'
        '[ucx]\nenabled = false\n[cluster]\npeers = ["tcp:b:1"]\n'
    )
    config = load_config(PoolNodeConfig, tmp_path / "pool.toml", {"lease_s": 5.0})
    assert (config.name, config.capacity, config.ucx.enabled, config.lease_s) == ("a", 64 << 20, False, 5.0)
    assert (config.cluster.peers, config.address, config.weight) == (["tcp:b:1"], "unix:/s", 1)
    assert PoolNodeConfig(capacity_bytes=1000 << 20).capacity == 992 << 20
    assert PoolNodeConfig(capacity_bytes=96 << 30).weight == 96


@pytest.mark.parametrize(
    ("address", "is_here"),
    [(address, True) for address in ("ipc:///run/a/b", "tcp://127.0.0.1:5557", "tcp://[::1]:1", "")]
    + [(f"tcp://{host}:5557", False) for host in ("*", "0.0.0.0", "[::]", "10.0.0.5")],
)
def test_events_go_to_other_hosts_only_where_all_are_trusted(address: str, is_here: bool) -> None:
    if is_here:
        EventsConfig(address=address)
    else:
        with pytest.raises(ValueError, match="events ask for no token"):
            EventsConfig(address=address)
    assert EventsConfig(address=address, trusted_network=True).address == address


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


# --- namespaces and tokens


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
    assert rules.admin_token == digest(TOKEN)
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
def test_a_namespace_that_cannot_be_is_said_in_one_line(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        rules_of(load(tmp_path, f'[[namespaces]]\nname = "a"\n{table}'))
    assert "\n" not in str(error.value)


def test_tokens_of_namespaces_need_an_administrator_and_an_empty_file_is_no_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no admin_token"):
        rules_of(load(tmp_path, f'[[namespaces]]\nname = "a"\nread_token = "{WRITER}"', admin_token=""))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        rules_of(load(tmp_path, "", admin_token="", admin_token_file=str(tmp_path / "empty")))


@pytest.mark.parametrize("given", ["a", "fifteen-letters"])
@pytest.mark.parametrize("name", ["admin_token", "cluster.token"])
@pytest.mark.parametrize("how", ["text", "file", "environment"])
def test_a_token_that_could_be_guessed_is_refused_wherever_it_is_given(
    given: str, name: str, how: str, tmp_path: Path
) -> None:
    (tmp_path / "short").write_text(f"{given}\n")
    text: dict[str, Any] = {"text": {"token": given}, "file": {"token_file": str(tmp_path / "short")}}.get(
        how, {}
    )
    environ = {f"PDSERVE_POOL_{name.upper().replace('.', '_')}": given} if how == "environment" else {}
    options = {"cluster": text} if name == "cluster.token" else {f"admin_{key}": text[key] for key in text}
    with pytest.raises(ConfigError, match=rf"{name} must be 16 characters or more"):
        rules_of(with_secrets(load(tmp_path, "", **{"admin_token": "", **options}), environ))


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
    (tmp_path / "node.toml").write_text(EXAMPLE.read_text().replace("/etc/pdserve", str(tmp_path)))
    for name in ("pool-admin", "pool-cluster", "pool"):
        (tmp_path / f"{name}-token").write_text(f"{TOKEN}-{name}")
    loaded = load_config(PoolNodeConfig, tmp_path / "node.toml", {"cluster.advertise": "tcp:pool-a:7700"})
    config = with_secrets(loaded, {})
    assert check_open(config, rules_of(config)) == []
    assert (config.cluster.peers[0], config.log_format) == ("tcp:pool-a:7700", "json")
