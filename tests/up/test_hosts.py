"""Plans for several hosts: counts, needs, names of hosts in place of loopback, tokens."""

from __future__ import annotations

import socket
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.up.config import ClusterFile, read_cluster_file
from pdserve.up.hosts import Demand, Site, spread, without_node
from pdserve.up.locks import has_ipv6_alone
from pdserve.up.plan import demands, make_plan
from pdserve.up.spec import ConnectReady, HttpReady, Plan
from tests.support.addresses import names_of

RUN = Path("/run/x")
HOSTS = {"pool0": "a", "pool1": "b", "prefill0": "a", "decode0": "b", "router": "a"}
FILE = ClusterFile(pool=[{}, {}], prefill=[{}], decode=[{}])


def plan_of(file: ClusterFile, hosts: dict[str, str], **tokens: str) -> Plan:
    ports = count(20_000)
    return make_plan(file, program=("p",), run_dir=RUN, uid=7, ports=ports, site=Site(hosts, **tokens))


def configs(plan: Plan) -> dict[str, dict[str, Any]]:
    return {spec.name: spec.config for spec in plan.processes}


def read(tmp_path: Path, text: str) -> ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path, {}, {})


def test_a_count_repeats_a_table_and_numbers_its_name(tmp_path: Path) -> None:
    text = '[[pool]]\ncount = 2\n[[decode]]\ncount = 2\nname = "big"\n[[decode]]\ncount = 0\n[[agg]]\n'
    assert [one.name for one in demands(read(tmp_path, text))] == [
        "pool0", "pool1", "big-0", "big-1", "agg0", "router",
    ]  # fmt: skip


def test_needs_are_read_and_reach_no_process() -> None:
    table = {"place": {"hosts": ["a"]}, "gpus": 2, "engine": {"extra_args": ["--tp-size=2"]}}
    plan = plan_of(ClusterFile(agg=[table]), {"agg0": "a", "router": "a"})
    agg = plan.processes[0]
    assert (agg.needs_gpus, agg.gpu_count, agg.gpu_numbers) == (True, 2, ())
    assert {"place", "gpus"} & agg.config.keys() == set()
    worker, router = demands(ClusterFile(agg=[{"gpus": [1, 2, 3], "place": {"hosts": ["a"]}}]))
    assert (worker.hosts, worker.gpus, worker.gpu_numbers, router.gpus) == (("a",), 3, (1, 2, 3), 0)


def test_processes_of_several_hosts_find_each_other_by_the_names_of_hosts() -> None:
    plan = plan_of(FILE, HOSTS)
    found = configs(plan)
    pool = {name: found[name]["cluster"]["advertise"] for name in ("pool0", "pool1")}
    assert pool["pool0"].startswith("tcp:a:")
    assert pool["pool1"].startswith("tcp:b:")
    assert found["pool0"]["cluster"]["peers"] == list(pool.values())
    port = pool["pool0"].rpartition(":")[2]
    assert found["pool0"]["listen"] == [f"tcp:0.0.0.0:{port}", "unix:/run/x/pool0.sock"]
    assert found["decode0"]["engine"]["host"] == "0.0.0.0"
    assert found["router"]["decode"] == [found["decode0"]["advertise"]]
    assert found["decode0"]["advertise"].startswith("http://b:")
    assert found["router"]["host"] == "127.0.0.1"
    ready = {spec.name: spec.ready for spec in plan.processes}
    assert ready["pool1"] == ConnectReady(pool["pool1"])
    assert ready["decode0"] == HttpReady(found["decode0"]["advertise"] + "/pd/ready")
    assert [spec.host for spec in plan.processes] == ["a", "b", "a", "b", "a"]
    seen = {
        name: [node["address"] for node in found[name]["pool"]["nodes"]] for name in ("prefill0", "decode0")
    }
    assert seen["prefill0"] == ["unix:/run/x/pool0.sock", pool["pool1"]], "its own host's by the socket"
    assert seen["decode0"] == [pool["pool0"], "unix:/run/x/pool1.sock"]


def test_pool_nodes_of_several_hosts_get_tokens_unless_the_file_has_some() -> None:
    file = ClusterFile(pool=[{}, {"admin_token_file": "/x"}], agg=[{}])
    hosts = {"pool0": "a", "pool1": "b", "agg0": "b", "router": "a"}
    found = configs(plan_of(file, hosts, node_token="n" * 20, page_token="p" * 20))
    assert found["pool0"]["admin_token"] == found["pool0"]["cluster"]["token"] == "n" * 20
    assert found["pool0"]["namespace_defaults"] == {"read_token": "p" * 20}
    assert "admin_token" not in found["pool1"]
    assert found["agg0"]["pool"]["token"] == "p" * 20


def test_one_port_on_two_hosts_is_fine_and_on_one_host_is_not() -> None:
    file = ClusterFile(agg=[{"engine": {"port": 1}}, {"engine": {"port": 1}}])
    plan_of(file, {"agg0": "a", "agg1": "b", "router": "a"})
    with pytest.raises(ConfigError, match="port 1 on a is given to two"):
        plan_of(file, {"agg0": "a", "agg1": "a", "router": "a"})


def test_a_pool_node_without_an_address_for_others_is_refused() -> None:
    file = ClusterFile(pool=[{"listen": ["unix:/x"]}], agg=[{}])
    with pytest.raises(ConfigError, match=r"'pool\[0\].listen' needs an address tcp:HOST:PORT"):
        plan_of(file, {"pool0": "a", "agg0": "b", "router": "a"})


def test_a_host_with_workers_and_no_pool_node_gets_one_that_changes_no_other_process() -> None:
    hosts = {"pool0": "a", "agg0": "a", "agg1": "b", "agg2": "b", "router": "a"}
    file = ClusterFile(pool=[{}], agg=[{}, {}, {}])
    roles: Any = {name: name.rstrip("0123456789") for name in hosts}
    assert without_node(roles, hosts) == ["agg1"]
    assert without_node(roles, {**hosts, "pool0": "b"}) == ["agg0"]
    own = {"name": "agg1-pool", "place": {"beside": "agg1"}, "capacity_bytes": "1GiB"}
    file = msgspec.structs.replace(file, pool=[{}, own])
    placed = spread(demands(file), ["c", "a", "b"], "a")
    assert placed["agg1-pool"] == placed["agg1"] == "a"
    found = {spec.name: spec.config for spec in plan_of(file, {**hosts, "agg1-pool": "b"}).processes}
    assert "peers" not in found["pool0"].get("cluster", {})
    assert len(found["agg1-pool"]["cluster"]["peers"]) == 1
    assert [node["node"] for node in found["agg0"]["pool"]["nodes"]] == ["pool0"]
    assert [node["node"] for node in found["agg2"]["pool"]["nodes"]] == ["pool0", "agg1-pool"]
    assert found["agg2"]["pool"]["nodes"][1]["address"].startswith("unix:")


ROUTED = ClusterFile(pool=[{}], agg=[{}], router={"count": 2, "port": 8000})
ROUTED_HOSTS = {"pool0": "a", "agg0": "b", "router0": "a", "router1": "b"}


def test_each_of_several_routers_knows_all_workers_and_the_token_of_the_cluster() -> None:
    ports, site = count(20_000), Site(ROUTED_HOSTS, far=frozenset({"agg0", "router1"}))
    plan = make_plan(
        ROUTED, program=("p",), run_dir=RUN, uid=7, ports=ports, cluster_token="t" * 20, site=site
    )
    found = configs(plan)
    assert [spec.name for spec in plan.routers] == ["router0", "router1"]
    for router in plan.routers:
        assert router.config["agg"] == [found["agg0"]["advertise"]]
        assert router.config["access"] == {"cluster_token": "t" * 20}
    assert plan.router_url == "http://127.0.0.1:8000"
    assert plan.routers[1].ready == HttpReady("http://b:8000/ready")  # it listens for others, here's does not


def test_on_hosts_that_have_ipv6_alone_everything_listens_there() -> None:
    hosts = {"pool0": "fd00::1", "agg0": "fd00::2", "router": "fd00::1"}
    site = Site(hosts, far=frozenset({"agg0"}), ipv6=frozenset(hosts.values()))
    plan = make_plan(
        ClusterFile(pool=[{}], agg=[{}]),
        program=("pdserve",), run_dir=RUN, uid=7, ports=count(20_000), site=site,
    )  # fmt: skip
    found = {spec.name: spec for spec in plan.processes}
    assert found["pool0"].config["listen"][0] == "tcp:[::]:20002"
    assert found["pool0"].config["cluster"]["advertise"] == "tcp:[fd00::1]:20002"
    assert found["agg0"].config["engine"]["host"] == "::"
    assert found["agg0"].config["advertise"] == "http://[fd00::2]:20000"
    assert found["router"].config["agg"] == ["http://[fd00::2]:20000"]


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [(["fd00::5"], True), (["fd00::5", "192.0.2.1"], False), (["192.0.2.1"], False)],
)
def test_a_host_has_ipv6_alone_if_its_name_has_no_other_address(
    addresses: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of(*addresses))
    assert has_ipv6_alone("host-a") is alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[agg]]\nplace = 7", "place"),
        ("[[agg]]\nplace.gpus = 1", "unknown key 'place.gpus'"),
        ("[[agg]]\ngpus = [0, -1]", "gpus"),
        ("[[agg]]\ngpus = true", "gpus"),
        ("[[agg]]\n[[pool]]\ngpus = 1", r"'pool\[0\].gpus': only workers have GPUs"),
        ("[[agg]]\ncount = -1", r"'agg\[0\]\.count' must be a number"),
        ("[[agg]]\ncount = 20000", r"'agg\[0\]\.count' must be a number"),
        ("[[agg]]\n[router]\ncount = 0", r"'router\.count' must be 1 or more, but beside"),
    ],
)
def test_what_no_host_can_give_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demands(read(tmp_path, text))


def demand(name: str, *numbers: int, gpus: int = 0, hosts: str = "") -> Demand:
    role: Any = name.rstrip("0123456789")
    return Demand(name, role, tuple(hosts), gpus or len(numbers), numbers)


@pytest.mark.parametrize(
    ("wanted", "own", "found"),
    [
        ([demand(name) for name in ("pool0", "pool1", "prefill0", "decode0", "router")], "b", "ababb"),
        ([demand("agg0", gpus=6), demand("agg1", gpus=4, hosts="b"), demand("agg2", gpus=4)], "a", "abb"),
        ([demand(f"router{i}") for i in range(2)], "b", "ba"),
        ([demand(f"router{i}", hosts="a") for i in range(2)], "b", "aa"),
        (
            [demand("agg0", 0, 1), demand("agg1", 2, 3, hosts="a"), demand("agg2", 0), demand("agg3", 4, 5)],
            "a",
            "aabb",
        ),
    ],
    ids=["pool nodes and workers apart", "by GPUs", "routers", "where they may", "named GPUs once a host"],
)
def test_processes_are_spread_over_hosts(wanted: list[Demand], own: str, found: str) -> None:
    assert spread(wanted, ["a", "b"], own) == dict(zip([one.name for one in wanted], found, strict=True))


def test_what_fits_on_no_host_is_refused() -> None:
    with pytest.raises(StartupError, match="no host fits"):
        spread([demand("agg0", hosts="c")], ["a", "b"], "a")
    with pytest.raises(StartupError, match="agg2: GPU 0 is given to another worker on each of a, b"):
        spread([demand(f"agg{i}", 0) for i in range(3)], ["a", "b"], "a")
