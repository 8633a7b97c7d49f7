"""What a configuration leaves open to strangers: a table of configurations and of what is said of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.doctor import exposure
from pdserve.settings.config_file import build_config, read_toml

FAR_NODE = """
listen = ["tcp:10.0.0.5:7700"]
admin_token = "an-admin-token-of-a-good-length"
namespace_defaults.read_token = "a-token-for-all-namespaces"
cluster.token = "the-token-of-the-pools-nodes"
tls = { certificate = "/c", key = "/k", ca = "/a", client_ca = "/a" }
"""
FAR_ROUTER = """
host = "0.0.0.0"
decode = ["http://127.0.0.1:8100"]
access = { keys_file = "/keys", tls_cert_file = "/c", tls_key_file = "/k" }
"""
FAR_ADMIN = """
[admin]
port = 1
host = "10.0.0.1"
key = "a-key-of-some-length"
tls = { certificate = "/c", key = "/k", client_ca = "/a" }
"""
WORKER = """
cluster_token = "the-token-of-all-the-workers"
engine = { model_path = "demo-tiny", host = "10.0.0.7" }
pool = { nodes = [{ node = "a", address = "tcp:10.0.0.5:7700" }], tls = { ca = "/a" } }
"""


def said_of(role: str, text: str, tmp_path: Path) -> list[str]:
    file = tmp_path / "part.toml"
    file.write_text(text)
    part = build_config(exposure.KINDS[role], read_toml(file), source=str(file))
    return [finding.says for finding in exposure.judge([part]) if finding.level != "ok"]


@pytest.mark.parametrize(
    ("role", "text", "says"),
    [
        ("pool", FAR_NODE, ""),
        ("pool", "", ""),
        ("pool", 'listen = ["unix:/run/p.sock", "tcp:[::1]:7700"]\nucx.trusted_network = true', ""),
        ("router", FAR_ROUTER, ""),
        (
            "router",
            'decode = ["http://127.0.0.1:8100"]\nadmin = { port = 1, key = "a-key-of-some-length" }',
            "",
        ),
        ("router", FAR_ROUTER + FAR_ADMIN, ""),
        ("pool", FAR_NODE + 'metrics = "10.0.0.5:9100"\nmetrics_token_file = "/t"', ""),
        ("pool", FAR_NODE + 'metrics = "127.0.0.1:9100"', ""),
        ("decode", WORKER, ""),
        ("pool", FAR_NODE + 'cluster.etcd = { endpoints = ["https://e:2379"], certificate_file = "/c" }', ""),
        ("pool", FAR_NODE + "insecure = true", "insecure = true lets every host"),
        ("pool", FAR_NODE.partition("tls =")[0], "read and changed on the wire"),
        ("pool", FAR_NODE + 'metrics = "0.0.0.0:9100"', "its metrics at 0.0.0.0:9100"),
        ("pool", FAR_NODE + 'metrics = "[::]:9100"', "its metrics at [::]:9100"),
        ("pool", FAR_NODE + "ucx.trusted_network = true", "UCX listens on all interfaces"),
        (
            "pool",
            'events = { address = "tcp://0.0.0.0:5557", trusted_network = true }',
            "its events at tcp://0.0.0.0:5557 tell every host",
        ),
        ("pool", FAR_NODE + 'ucx = { trusted_network = true, devices = "ib0" }', "UCX listens on ib0"),
        ("pool", 'admin_token = "short"', "admin_token is shorter than 16"),
        ("pool", 'cluster.etcd = { endpoints = ["http://10.0.0.1:2379"], username = "u" }', "without TLS"),
        (
            "pool",
            'cluster.etcd = { endpoints = ["https://10.0.0.1:2379"] }',
            "no certificate",
        ),
        ("router", FAR_ROUTER + "insecure = true", "use the models"),
        ("router", 'host = "0.0.0.0"\naccess.keys_file = "/keys"', "API keys and prompts can be read"),
        ("router", 'admin = { port = 1, host = "10.0.0.1" }', "the admin API listens at 10.0.0.1"),
        (
            "router",
            'admin = { port = 1, host = "10.0.0.1", tls = { ca = "/a" } }',
            "the admin API listens at 10.0.0.1",
        ),
        ("router", 'agg = ["http://10.0.0.7:8100"]', "the cluster token go to http://10.0.0.7:8100"),
        ("router", 'agg = ["dns+http://agg:8100"]', "the cluster token go to dns+http://agg:8100"),
        ("agg", WORKER + "insecure = true", "users of its host control SGLang"),
        ("agg", WORKER.replace(', tls = { ca = "/a" }', ""), "go to pool node a without encryption"),
    ],
)
def test_what_is_open_is_said_in_one_line_and_nothing_else(
    role: str, text: str, says: str, tmp_path: Path
) -> None:
    found = said_of(role, text, tmp_path)
    assert len(found) == bool(says)
    assert says in "".join(found)
    assert "\n" not in "".join(found)
