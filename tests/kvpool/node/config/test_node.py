from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.settings.config_file import load_config
from pdserve.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("512 mib", 512 << 20),
        ("1.5KB", 1500),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_read_in_the_usual_units(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("field", ["bytes_s", "batch_bytes"])
@pytest.mark.parametrize(("size", "said"), [("fast", "'fast' is not a size"), (-1, "must not be negative")])
def test_sizes_of_moving_are_read_with_the_configuration(
    tmp_path: Path, field: str, size: str | int, said: str
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f"[moving]\n{field} = {size!r}\n")
    with pytest.raises(ConfigError, match=rf"moving.*{field}.*{said}"):
        load_config(PoolNodeConfig, path, {})


@pytest.mark.parametrize("text", ["", "GiB", "4GiX", "-1", "4 GiB more", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_capacity_is_whole_slabs() -> None:
    config = PoolNodeConfig(capacity_bytes="1000MiB")
    assert config.capacity == 992 << 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity_bytes": "1KiB"}, "at least 16KiB"),
        ({"capacity_bytes": 0}, "at least 16KiB"),
        ({"page_bytes": "2GiB"}, "page_bytes must be at most capacity_bytes and 2GiB"),
        ({"page_bytes": "3GiB", "capacity_bytes": "8GiB"}, "page_bytes must be at most"),
        ({"listen": []}, "listen"),
        ({"name": "../x"}, "name"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"max_connections": 0}, "max_connections"),
        ({"log_format": "xml"}, "log_format"),
        ({"cluster": {"peers": ["a:1"]}}, '"a:1" is not "unix:/path"'),
        ({"cluster": {"advertise": "tcp:x"}}, '"tcp:x" is not'),
        ({"cluster": {"peers": ["dns+tcp:a"]}}, "is not of the form dns"),
        ({"cluster": {"peers": ["dns+tcp:a:1"]}, "tls": {"ca": "/ca"}}, "certificates name hosts"),
        ({"cluster": {"peers": ["tcp:a:1"]}, "listen": ["tcp:0.0.0.0:7700"]}, "cluster.advertise is needed"),
        ({"tls": {"certificate": "/c", "key": "/k"}}, "tls.ca is needed beside tls.certificate"),
        ({"capactiy_bytes": 1}, "capacity_bytes"),
    ],
)
def test_contradictions_are_config_errors_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(PoolNodeConfig, None, options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_sets_every_option(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(
        'name = "a"\nlisten = ["unix:/s", "tcp:127.0.0.1:1"]\ncapacity_bytes = "64MiB"\n'
        '[ucx]\nenabled = false\n[cluster]\npeers = ["tcp:b:1"]\n'
    )
    config = load_config(PoolNodeConfig, tmp_path / "pool.toml", {"lease_s": 5.0})
    assert (config.name, config.capacity, config.ucx.enabled, config.lease_s) == ("a", 64 << 20, False, 5.0)
    assert (config.cluster.peers, config.address) == (["tcp:b:1"], "unix:/s")


def test_a_nodes_weight_is_its_capacity() -> None:
    assert PoolNodeConfig(capacity_bytes="64MiB").weight == 1
    assert PoolNodeConfig(capacity_bytes="96GiB").weight == 96


def test_the_example_of_a_node_is_a_configuration() -> None:
    example = Path(__file__).parents[4] / "launch" / "pool-node.toml"
    config = load_config(PoolNodeConfig, example, {"cluster.advertise": "tcp:pool-a:7700"})
    assert config.cluster.peers[0] == "tcp:pool-a:7700"
    assert config.log_format == "json"
