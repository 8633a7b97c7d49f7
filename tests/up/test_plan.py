"""From cluster files to processes: pure, so every expectation is a whole value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import ClusterFile, ClusterSettings, Table, WorkerRole, read_cluster_file
from pdserve.up.plan import make_plan
from pdserve.up.spec import ConnectReady, HttpReady, Listening, Plan

RUN = Path("/run/x")


def plan_of(
    file: ClusterFile, *, ports: Sequence[int] = range(20_000, 20_100), extra: Sequence[str] = (), **more: Any
) -> Plan:
    place: dict[str, Any] = {"run_dir": RUN, "uid": 7} | more
    return make_plan(file, program=("pdserve",), ports=iter(ports), extra_args=extra, **place)


def read(tmp_path: Path, text: str, **counts: int | None) -> ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    by_role: dict[WorkerRole, int | None] = {"prefill": None, "decode": None, "agg": None, **counts}  # type: ignore[typeddict-item, dict-item]
    return read_cluster_file(path, {}, by_role)


def configs(plan: Plan) -> dict[str, Table]:
    return {spec.name: spec.config for spec in plan.processes}


def test_no_automatic_port_is_one_that_the_file_asks_for_anywhere() -> None:
    """Pool nodes, metrics and the admin port draw theirs as well; the process that was promised it would not
    find it free.
    """
    file = ClusterFile(
        router={"port": 20_000, "admin": {"tls": {}}},
        pool=[{"tcp": {"port": 20_001}}, {"listen": ["tcp:127.0.0.1:20002"]}, {"metrics": "[::1]:20003"}],
        prefill=[{"handoff": "direct", "direct": {"bootstrap_port": 20_004}}],
        decode=[{"engine": {"port": 20_005}}],
    )
    drawn = {port for spec in plan_of(file, admin_key="k").processes for port in spec.automatic_ports}
    assert len(drawn) >= 4
    assert min(drawn) == 20_006


def test_disagg_is_wired_whole() -> None:
    plan = plan_of(
        ClusterFile(
            cluster=ClusterSettings(name="c"),
            router={"port": 8000},
            worker={"engine": {"model_path": "m"}},
            pool=[{"capacity_bytes": "1GiB"}],
            prefill=[{}],
            decode=[{"engine": {"page_size": 32}}],
        )
    )
    nodes = [{"node": "pool0", "address": "unix:/run/x/pool0.sock"}]
    assert configs(plan) == {
        "pool0": {
            "capacity_bytes": "1GiB",
            "name": "pool0",
            "arena_dir": f"/dev/shm/pdserve-7/c-{sha256(b'/run/x').hexdigest()[:8]}",
            "listen": ["unix:/run/x/pool0.sock"],
            "metrics": "127.0.0.1:20002",
        },
        "prefill0": {
            "engine": {"model_path": "m", "host": "127.0.0.1", "port": 20_000},
            "pool": {"nodes": nodes},
            "stop_grace_s": 32.0,
        },
        "decode0": {
            "engine": {"model_path": "m", "page_size": 32, "host": "127.0.0.1", "port": 20_001},
            "pool": {"nodes": nodes},
            "stop_grace_s": 32.0,
        },
        "router": {
            "port": 8000,
            "stop_grace_s": 35.0,
            "host": "127.0.0.1",
            "prefill": ["http://127.0.0.1:20000"],
            "decode": ["http://127.0.0.1:20001"],
            "admin": {},
        },
    }
    assert [[spec.name for spec in stage] for stage in plan.stages] == [
        ["pool0"],
        ["prefill0", "decode0"],
        ["router"],
    ]
    assert plan.router_url == "http://127.0.0.1:8000"


def test_clusters_of_other_users_and_run_directories_hold_their_pages_elsewhere() -> None:
    def arena(run_dir: str, uid: int) -> str:
        plan = plan_of(ClusterFile(pool=[{}], agg=[{}]), run_dir=Path(run_dir), uid=uid)
        return str(configs(plan)["pool0"]["arena_dir"])

    assert arena("/a", 1) == arena("/a", 1)
    assert len({arena("/a", 1), arena("/b", 1), arena("/a", 2)}) == 3
    assert Path(arena("/a", 1)).parent != Path(arena("/a", 2)).parent


def test_each_process_gets_its_command_configuration_log_and_probe_and_secrets_in_its_file_alone() -> None:
    file = ClusterFile(pool=[{}], agg=[{}], elastic=[{}, {}])
    plan = plan_of(file, cluster_token="canary", admin_key="canary")
    specs = {spec.name: spec for spec in plan.processes}
    assert not any("canary" in " ".join([*spec.argv, *spec.env.values()]) for spec in plan.processes)
    assert list(specs) == ["pool0", "agg0", "elastic0", "elastic1", "router"]
    assert specs["elastic1"].argv == ("pdserve", "elastic", "--config", "/run/x/elastic1.toml")
    assert [len(specs["router"].config[role]) for role in ("agg", "elastic")] == [1, 2]
    assert specs["pool0"].argv == ("pdserve", "pool", "serve", "--config", "/run/x/pool0.toml")
    assert specs["agg0"].argv == ("pdserve", "agg", "--config", "/run/x/agg0.toml")
    assert specs["agg0"].log_path == RUN / "agg0.log"
    assert specs["pool0"].ready == ConnectReady("unix:/run/x/pool0.sock")
    assert specs["agg0"].ready == HttpReady("http://127.0.0.1:20000/pd/ready")
    assert specs["router"].ready == HttpReady("http://127.0.0.1:20003/ready")


def test_chosen_ports_are_kept_and_never_given_to_another() -> None:
    plan = plan_of(
        ClusterFile(router={"port": 20_001}, agg=[{}, {"engine": {"port": 20_000}}, {}]),
        ports=range(20_000, 20_009),
    )
    assert {spec.name: spec.listening for spec in plan.processes} == {
        "agg0": (Listening("127.0.0.1", 20_002, chosen=False),),
        "agg1": (Listening("127.0.0.1", 20_000, chosen=True),),
        "agg2": (Listening("127.0.0.1", 20_003, chosen=False),),
        "router": (Listening("127.0.0.1", 20_001, chosen=True),),
    }


def test_addresses_and_flags_of_the_file_are_kept_and_those_of_the_command_line_come_behind() -> None:
    elsewhere = [{"node": "far", "address": "tcp:10.0.0.1:7700"}]
    file = ClusterFile(
        router={"agg": ["http://h:1"]},
        pool=[{"listen": ["tcp:127.0.0.1:7700", "unix:/a"]}],
        worker={"engine": {"extra_args": ["--a"]}},
        agg=[{"pool": {"nodes": elsewhere}}, {"engine": {"extra_args": []}}],
    )
    plan = plan_of(file, extra=["--x", "1"])
    made = configs(plan)
    assert plan.processes[0].listening == (Listening("127.0.0.1", 7700, chosen=True),)
    assert made["agg0"]["pool"]["nodes"] == elsewhere
    assert made["agg1"]["pool"]["nodes"] == [{"node": "pool0", "address": "tcp:127.0.0.1:7700"}]
    assert made["router"]["agg"][:2] == ["http://h:1", "http://127.0.0.1:20000"]
    assert [made[name]["engine"]["extra_args"] for name in ("agg0", "agg1")] == [
        ["--a", "--x", "1"],
        ["--x", "1"],
    ]


def test_several_pool_nodes_are_each_others_peers() -> None:
    made = configs(plan_of(ClusterFile(pool=[{}, {"name": "b"}], agg=[{}])))
    nodes = [
        {"node": "pool0", "address": "unix:/run/x/pool0.sock"},
        {"node": "b", "address": "unix:/run/x/b.sock"},
    ]
    assert made["agg0"]["pool"]["nodes"] == nodes
    peers = [node["address"] for node in nodes]
    assert made["pool0"]["cluster"]["peers"] == made["b"]["cluster"]["peers"] == peers


def test_supervisor_keys_do_not_reach_the_process() -> None:
    file = ClusterFile(agg=[{"name": "mine", "restart": "never", "env": {"A": "1"}}])
    spec = plan_of(file).processes[0]
    assert (spec.name, spec.restart, spec.env) == ("mine", "never", {"A": "1"})
    assert set(spec.config) == {"engine", "pool", "stop_grace_s"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (ClusterFile(agg=[{"name": "a"}, {"name": "a"}]), "name a is given to two processes"),
        (ClusterFile(agg=[{"engine": {"port": 9}}] * 2), "port 9 is given to two processes"),
        (ClusterFile(agg=[{"restart": "always"}]), "[agg[0]]: 'restart'"),
        (ClusterFile(agg=[{"env": {"A": 1}}]), "[agg[0]]: 'env"),
        (ClusterFile(agg=[{"engine": {"port": "x"}}]), "'agg[0]' port must be a number"),
        (ClusterFile(agg=[{"engine": 3}]), "'agg[0].engine' must be a table"),
        (
            ClusterFile(pool=[{"listen": ["tcp:7700"]}], agg=[{}]),
            "'tcp:7700' is not of the form tcp:HOST:PORT",
        ),
        (ClusterFile(agg=[{"name": "a/b"}]), "[agg[0]]: 'name'"),
        (ClusterFile(agg=[{"name": 3}]), "[agg[0]]: 'name'"),
        (ClusterFile(agg=[{}], router={"host": 3}), "'router' host must be a string, found 3"),
        (ClusterFile(agg=[{}], router={"agg": "http://x:1"}), "'agg' of 'router' must be a list, found 'h"),
        (
            ClusterFile(agg=[{"engine": {"extra_args": "--tp 2"}}]),
            "'extra_args' of 'agg[0]' must be a list, found '--tp 2'",
        ),
        (
            ClusterFile(prefill=[{"handoff": "direct", "direct": {"bootstrap_port": "x"}}]),
            "'prefill[0].direct.bootstrap_port' must be a number",
        ),
        (ClusterFile(pool=[{"name": "n" * 64}], agg=[{}]), "too long for a socket"),
    ],
)
def test_refuses_what_cannot_run(file: ClusterFile, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(file, extra=["--more"], run_dir=Path("/" + "n" * 40))
    assert message in str(caught.value)


def test_counts_repeat_the_last_table_without_name_and_port_or_drop_the_last(tmp_path: Path) -> None:
    text = '[[decode]]\nname="first"\n[[decode]]\nname="last"\nengine={port=9, page_size=2}'
    assert read(tmp_path, text, decode=3).decode == [
        {"name": "first"},
        {"name": "last", "engine": {"port": 9, "page_size": 2}},
        {"engine": {"page_size": 2}},
    ]
    assert read(tmp_path, text, decode=1).decode == [{"name": "first"}]
    assert read(tmp_path, text, agg=2).agg == [{}, {}]


def test_base_file_lies_under_the_table(tmp_path: Path) -> None:
    (tmp_path / "router.toml").write_text("port = 1\n[session]\nttl_s = 5\n")
    file = read(
        tmp_path, '[[agg]]\n[router]\nbase = "router.toml"\nport = 2\n[router.session]\ncapacity = 3\n'
    )
    assert file.router == {"port": 2, "session": {"ttl_s": 5, "capacity": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no worker"),
        ("[[prefill]]", "need a [[decode]] or [[agg]] worker"),
        ("[[decoder]]", "unknown key 'decoder' (did you mean 'decode'?)"),
        ("[cluster]\nrundir='x'", "unknown key 'cluster.rundir' (did you mean 'cluster.run_dir'?)"),
        ("[[agg]]\nbase='none.toml'", "none.toml: no such configuration file"),
    ],
)
def test_refuses_a_cluster_file_that_makes_no_sense(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_cluster_gets_one_token_for_its_workers_and_router() -> None:
    """The empty one of a base file, as launch/router.toml has it, is no token of its own."""
    for access in ({"keys_file": "k"}, {"keys_file": "k", "cluster_token": ""}):
        file = ClusterFile(pool=[{}], prefill=[{}], decode=[{}], router={"access": access})
        made = configs(plan_of(file, cluster_token="t"))
        assert made["prefill0"]["cluster_token"] == made["decode0"]["cluster_token"] == "t"
        assert made["router"]["access"] == {"keys_file": "k", "cluster_token": "t"}
        assert "cluster_token" not in made["pool0"]


@pytest.mark.parametrize(
    "file",
    [
        ClusterFile(agg=[{"cluster_token": ""}, {}]),
        ClusterFile(agg=[{}], router={"access": {"cluster_token_file": "f"}}),
    ],
)
def test_a_token_of_the_file_is_not_overruled(file: ClusterFile) -> None:
    assert "'t'" not in str(configs(plan_of(file, cluster_token="t")))


def test_the_live_page_has_a_port_and_a_key_unless_the_file_says_otherwise() -> None:
    def planned(admin: dict[str, object]) -> Plan:
        return plan_of(ClusterFile(pool=[{}], agg=[{}], router={"admin": admin}), admin_key="k")

    as_shipped = planned({"host": "127.0.0.1", "key": ""})  # launch/router.toml
    assert configs(as_shipped)["router"]["admin"] == {
        "host": "127.0.0.1",
        "key": "k",
        "port": 20_003,
    }
    assert as_shipped.live_page == "http://127.0.0.1:20003/live/"
    own = {"host": "h", "port": 8001, "key_file": "f"}
    assert configs(planned(own))["router"]["admin"] == own
    assert plan_of(ClusterFile(agg=[{}])).live_page == ""


def test_workers_with_certificates_are_reached_by_https() -> None:
    tls = {"certificate": "/c", "key": "/k"}
    router = {"port": 8000, "tls": {"ca": "/ca"}}
    plan = plan_of(ClusterFile(worker={"tls": tls}, agg=[{}], router=router))
    assert configs(plan)["router"]["agg"] == ["https://127.0.0.1:20000"]
    ready = {spec.name: spec.ready for spec in plan.processes}
    assert ready["agg0"] == HttpReady("https://127.0.0.1:20000/pd/ready")
    mutual = plan_of(ClusterFile(worker={"tls": {**tls, "client_ca": "/ca"}}, agg=[{}], router=router))
    ready = {spec.name: spec.ready for spec in mutual.processes}
    assert ready["agg0"] == HttpReady("https://127.0.0.1:20000/pd/ready", ("/c", "/k"))
    assert ready["router"] == HttpReady("http://127.0.0.1:8000/ready")
    own = plan_of(ClusterFile(agg=[{}], router={"port": 8000, "access": {"tls_cert_file": "c"}}))
    assert own.router_url == "https://127.0.0.1:8000"
    with pytest.raises(ConfigError, match=r"router\.tls\.ca"):
        plan_of(ClusterFile(worker={"tls": tls}, agg=[{}]))


def test_processes_end_on_their_own_before_the_supervisor_ends_them() -> None:
    cluster = ClusterSettings(stop_grace_s=12.0)
    made = configs(plan_of(ClusterFile(cluster=cluster, agg=[{}])))
    assert [made[name]["stop_grace_s"] for name in ("router", "agg0")] == [7.0, 4.0]
    own = {"stop_grace_s": 60.0}
    given = configs(plan_of(ClusterFile(cluster=cluster, worker=own, agg=[{}], router=own)))
    assert [given[name]["stop_grace_s"] for name in ("router", "agg0")] == [60.0, 60.0]


def test_prefill_workers_that_hand_over_directly_get_a_bootstrap_port() -> None:
    given = {"handoff": "direct", "direct": {"bootstrap_port": 9001}}
    plan = plan_of(
        ClusterFile(
            cluster=ClusterSettings(name="c"),
            worker={"engine": {"model_path": "m"}},
            prefill=[{"handoff": "direct"}, given, {}],
            decode=[{"handoff": "direct"}],
        )
    )
    by_name = configs(plan)
    ports = [by_name[f"prefill{i}"].get("direct") for i in range(3)]
    assert ports[1:] == [{"bootstrap_port": 9001}, None]
    assert "direct" not in by_name["decode0"]
    specs = {spec.name: spec for spec in plan.processes}
    own = specs["prefill0"].listening
    assert ports[0] == {"bootstrap_port": own[1].port}
    assert len({place.port for spec in plan.processes for place in spec.listening}) == 7
    assert specs["prefill1"].listening[1] == Listening("127.0.0.1", 9001, True)


def commands(*tables: dict[str, Any], **more: Any) -> ClusterFile:
    return ClusterFile(**{"router": {"port": 8000}, "pool": [{}], "command": list(tables)} | more)


CACHE = {
    "name": "cache",
    "argv": ["cache", "--port={port}", "--http={port2}", '{"pool": {"nodes": {pool}}}'],
    "ready": "http://{host}:{port2}/healthcheck",
}
ENGINE = {
    "name": "engine0",
    "stage": 1,
    "role": "decode",
    "argv": ["engine", "--port", "{port}", "--cache", "tcp://{host:cache}:{port:cache}", "{other}"],
    "env": {"KEY": "{token}"},
}


def test_commands_are_wired_to_each_other_the_pool_and_the_router() -> None:
    plan = plan_of(commands(CACHE, ENGINE), cluster_token="secret")
    assert [[spec.name for spec in stage] for stage in plan.stages] == [
        ["pool0"], ["cache"], ["engine0"], ["router"],
    ]  # fmt: skip
    cache, engine, router = plan.processes[1:]
    port, http_port = cache.automatic_ports
    assert cache.argv[1:3] == (f"--port={port}", f"--http={http_port}")
    nodes = json.loads(cache.argv[3])["pool"]["nodes"]
    assert nodes == [{"node": "pool0", "address": "unix:/run/x/pool0.sock"}]
    assert cache.ready == HttpReady(f"http://127.0.0.1:{http_port}/healthcheck")
    own = engine.listening[0].port
    assert engine.argv == ("engine", "--port", str(own), "--cache", f"tcp://127.0.0.1:{port}", "{other}")
    assert engine.ready == HttpReady(f"http://127.0.0.1:{own}/health")
    assert router.config["decode"] == [f"http://127.0.0.1:{own}"]
    assert engine.env == {"KEY": "secret"}
    check_tables(plan, "c.toml", SCHEMAS)


def test_a_command_has_a_file_of_its_own_may_be_ready_by_a_connection_and_need_no_router() -> None:
    table = {
        "argv": ["x", "--config", "{config}"],
        "ready": "tcp:{host}:{port}",
        "config": {"pool": {"nodes": "{pool}"}, "port": 7, "url": "{url:router}"},
    }
    command = plan_of(commands(table)).processes[1]
    assert command.argv[2] == str(command.config_path) == "/run/x/command0.toml"
    assert command.config == {
        "pool": {"nodes": [{"node": "pool0", "address": "unix:/run/x/pool0.sock"}]},
        "port": 7,
        "url": "http://127.0.0.1:8000",
    }
    assert command.ready == ConnectReady(f"tcp:127.0.0.1:{command.listening[0].port}")
    front = {"argv": ["front"], "port": 9000, "stage": 1}
    plan = plan_of(commands(front, {"argv": ["x"]}, router={"count": 0}))
    assert [spec.name for spec in plan.processes] == ["pool0", "command1", "command0"]
    assert (plan.routers, plan.router_url, plan.live_page) == ([], "http://127.0.0.1:9000", "")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "argv"),
        ({"argv": ["x"], "rol": "agg"}, "unknown key 'rol' (did you mean 'role'?)"),
        ({"argv": ["{url:nobody}"]}, "no process 'nobody' of this cluster listens"),
        ({"argv": ["{token}"]}, "{token} may stand in env alone"),
        ({"argv": ["{pool:pool0}"]}, "only host, port and url may be another process's"),
        ({"argv": ["x"], "role": "elastic"}, "role"),
    ],
)
def test_a_command_that_cannot_work_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(commands(table))
    assert says in str(caught.value)
