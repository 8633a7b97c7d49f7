"""The Helm chart: objects that Kubernetes takes, whose containers get configurations that pdserve takes,
that hold no secret, and that an autoscaler, two releases and other values leave whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import kubernetes_validate
import pytest
import typer
import yaml
from typer.testing import CliRunner

from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.admin.cli import app as pool_app
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.router.config.router import RouterConfig
from pdserve.settings.command_line import config_command

CHART: Final = Path(__file__).parents[1] / "launch" / "helm"
FOREIGN: Final = {"PodMonitor", "InferencePool", "LeaderWorkerSet"}
"""Kinds that are not Kubernetes' own, and have no schema here."""
KEYS: Final = {"access": {"keys_file": "/etc/pdserve/secrets/keys.toml"}}
PLAIN: Final[dict[str, Any]] = {"router": {"config": KEYS}}
FULL: Final[dict[str, Any]] = {
    "pool": {
        "capacityGiB": 4,
        "hugePages": "2MiB",
        "config": {"numa_node": 0, "events": {"address": "tcp://0.0.0.0:5557", "trusted_network": True}},
        "tiers": [
            {"kind": "ssd", "capacity_bytes": "100GiB", "volume": {"storage": "110Gi"}},
            {"kind": "object", "capacity_bytes": "50TiB", "write": "all", "options": {"url": "s3://b/p"}},
        ],
    },
    "workers": {
        "prefill": {"gpus": 4, "config": {"handoff": "direct", "direct": {"bootstrap_port": 8998}}},
        "decode": {"autoscale": {"min": 2, "max": 8}, "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
        "big": {
            "role": "agg",
            "hosts": 2,
            "gpus": 8,
            "args": ["--tp-size", "16"],
            "config": {"engine": {"trusted_network": True}},
        },
    },
    "router": {"config": KEYS, "replicas": 2, "pod": {"nodeSelector": {"zone": "a"}}},
    "networkPolicy": {"eventSubscribers": [{"podSelector": {"matchLabels": {"app": "dynamo"}}}]},
    "monitoring": {"enabled": True},
    "gateway": {"enabled": True},
}
CERTIFICATES: Final = {
    "certificate": "/etc/pdserve/secrets/tls.crt",
    "key": "/etc/pdserve/secrets/tls.key",
    "ca": "/etc/pdserve/secrets/ca.crt",
}
MUTUAL: Final[dict[str, Any]] = {
    "pool": {"config": {"tls": CERTIFICATES}},
    "workerDefaults": {"config": {"tls": {**CERTIFICATES, "client_ca": CERTIFICATES["ca"]}}},
    "workers": {"decode": {"autoscale": {"max": 3}}},
    "router": {"config": {**KEYS, "tls": CERTIFICATES}},
}
OPEN: Final[dict[str, Any]] = {
    "pool": {"replicas": 1, "config": {"insecure": True}},
    "workerDefaults": {"config": {"insecure": True}},
    "router": {"config": {"insecure": True, "etcd": {"endpoints": ["http://etcd:2379"]}}},
    "networkPolicy": {"enabled": False},
}
AGG: Final[dict[str, Any]] = {**PLAIN, "workers": {"prefill": None, "decode": None, "agg": {"gpus": 1}}}
ALL: Final = {"plain": PLAIN, "agg": AGG, "full": FULL, "mutual TLS": MUTUAL, "open": OPEN}
Object = dict[str, Any]


def made(values: dict[str, Any], release: str = "disagg") -> dict[tuple[str, str], Object]:
    """The chart's objects, by kind and name."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=release).values()
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    objects = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(objects) == len(found), "two objects have one name"
    return objects


def find(value: object, key: str) -> Iterator[Any]:
    """What stands under `key`, wherever it is."""
    if isinstance(value, dict):
        for name, below in value.items():
            if name == key:
                yield below
            yield from find(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from find(below, key)


def pods(objects: dict[tuple[str, str], Object]) -> list[Object]:
    """All templates of pods."""
    return [
        template
        for one in objects.values()
        for key in ("template", "leaderTemplate", "workerTemplate")
        for template in find(one.get("spec"), key)
    ]


def of_role(objects: dict[tuple[str, str], Object], role: str) -> Object:
    """The template of the pods of this role."""
    (template,) = [
        one for one in pods(objects) if one["metadata"]["labels"].get("app.kubernetes.io/component") == role
    ]
    return template


def test_helm_finds_no_fault() -> None:
    said = helm.lint(CHART)
    assert (said["errors"], {one["error"] for one in said["messages"]} - {"icon is recommended"}) == (
        [],
        set(),
    )


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_kubernetes_schemas_take_every_object(values: dict[str, Any]) -> None:
    version = kubernetes_validate.latest_version()
    objects = made(values)
    for one in objects.values():
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, version, strict=True)
    for template in pods(objects):  # those of kinds without a schema too
        spec = {"serviceName": "x", "selector": {"matchLabels": {}}, "template": template}
        stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(stateful, version, strict=True)
        template["spec"]["containers"][0]["image"] = 5
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(stateful, version, strict=True)


def options_of(template: Object, objects: dict[tuple[str, str], Object], directory: Path) -> Any:
    """What pdserve makes of a container's command and configuration."""
    (container,) = template["spec"]["containers"]
    words = [word.replace("$(POD_NAME)", "disagg-x-0") for word in container["args"]]
    role = words.pop(0)
    if role == "pool":
        assert words.pop(0) == "serve"
    (volume,) = [one["configMap"]["name"] for one in template["spec"]["volumes"] if "configMap" in one]
    place, _, name = words[words.index("--config") + 1].rpartition("/")
    assert {"name": "config", "mountPath": place, "readOnly": True} in container["volumeMounts"]
    file = directory / f"{volume}-{name}"
    file.write_text(objects["ConfigMap", volume]["data"][name])
    words[words.index("--config") + 1] = str(file)
    kind = {"pool": PoolNodeConfig, "router": RouterConfig}.get(role, WorkerConfig)
    got: list[Any] = []
    extra = "engine.extra_args" if kind is WorkerConfig else None
    command = config_command(kind, got.append, help="", extra_args_key=extra)
    result = CliRunner().invoke(command, words)
    if result.exception is not None:
        raise result.exception
    return got[0]


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_pdserve_takes_commands_and_configurations_and_their_secrets_are_mounted(
    values: dict[str, Any], tmp_path: Path
) -> None:
    objects = made(values)
    for template in pods(objects):
        config = options_of(template, objects, tmp_path)
        if isinstance(config, RouterConfig):
            config.check_workers()
        (container,) = template["spec"]["containers"]
        for command in find(container, "command"):  # of the hook before a pod ends
            if command[0] == "pdserve":
                assert command[1:3] == ["pool", "drain"]
                drain = typer.main.get_group(pool_app).commands["drain"]
                drain.make_context("drain", command[3:])
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        claims = {
            one["metadata"]["name"]
            for some in find(list(objects.values()), "volumeClaimTemplates")
            for one in some
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, *claims}
        (text,) = objects["ConfigMap", volumes["config"]["configMap"]["name"]]["data"].values()
        named = set(re.findall(r"/etc/pdserve/secrets/([-._A-Za-z0-9]+)", f"{text}{container}"))
        mounted = {item["key"] for items in find(volumes.get("secrets"), "items") for item in items}
        assert named == mounted


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_pods_have_no_rights_and_their_probes_ask_routes_that_there_are(values: dict[str, Any]) -> None:
    for template in pods(made(values)):
        spec = template["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert {one["path"] for one in find(container, "httpGet")} <= {"/pd/ready", "/ready", "/health"}
        ports = {one["name"] for one in container["ports"]}
        assert {one["port"] for key in ("httpGet", "tcpSocket") for one in find(container, key)} <= ports


def test_a_group_that_is_scaled_has_no_number_of_its_own() -> None:
    objects = made(FULL)
    assert "replicas" not in objects["StatefulSet", "disagg-decode"]["spec"]
    scaler = objects["HorizontalPodAutoscaler", "disagg-decode"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    assert scaler["scaleTargetRef"]["kind"] == "StatefulSet"
    assert objects["StatefulSet", "disagg-prefill"]["spec"]["replicas"] == 1
    assert objects["Deployment", "disagg-router"]["spec"]["replicas"] == 2


def test_tiers_on_disks_have_claims_and_those_in_buckets_reach_them() -> None:
    objects = made(FULL)
    pool = objects["StatefulSet", "disagg-pool"]["spec"]
    (claim,) = pool["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "tier0"
    assert claim["spec"]["resources"]["requests"] == {"storage": "110Gi"}
    assert {"name": "tier1", "emptyDir": {}} in pool["template"]["spec"]["volumes"]
    policy = objects["NetworkPolicy", "disagg-pool"]["spec"]
    assert [one["ports"] for one in policy["egress"] if "to" not in one] == [
        [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
        [{"port": 443}],
    ]
    assert made(PLAIN)["NetworkPolicy", "disagg-pool"]["spec"]["egress"][2:] == []


def test_events_have_a_port_for_those_who_may_read_them() -> None:
    objects = made(FULL)
    (container,) = of_role(objects, "pool")["spec"]["containers"]
    assert {"name": "events", "containerPort": 5557} in container["ports"]
    opened = objects["NetworkPolicy", "disagg-pool"]["spec"]["ingress"]
    assert [one["from"] for one in opened if one.get("ports") == [{"port": 5557}]] == [
        [{"podSelector": {"matchLabels": {"app": "dynamo"}}}]
    ]


def test_pool_nodes_have_memory_for_their_pages() -> None:
    plain = of_role(made(PLAIN), "pool")["spec"]
    assert plain["containers"][0]["resources"]["limits"] == {"memory": "4096Mi"}
    (shm,) = [one["emptyDir"] for one in plain["volumes"] if one["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": "2152Mi"}
    huge = of_role(made(FULL), "pool")["spec"]["containers"][0]
    assert huge["resources"]["limits"] == {"memory": "2048Mi", "hugepages-2Mi": "4096Mi"}
    assert huge["securityContext"]["capabilities"]["add"] == ["SYS_NICE"]
    assert int(huge["lifecycle"]["preStop"]["exec"]["command"][5]) == 42


def test_ranks_on_several_hosts_are_groups_of_pods_of_which_one_is_a_worker(tmp_path: Path) -> None:
    objects = made(FULL)
    group = objects["LeaderWorkerSet", "disagg-big"]["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, member = group["leaderTemplate"], group["workerTemplate"]
    for template in (leader, member):
        (container,) = template["spec"]["containers"]
        words = container["args"][container["args"].index("--") :]
        assert words == [
            *("--", "--tp-size", "16", "--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)"),
            *("--dist-init-addr", "$(LWS_LEADER_ADDRESS):20000"),
        ]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}, "of each pod"
        selector = objects["Service", "disagg-big"]["spec"]["selector"]
        assert selector.items() <= template["metadata"]["labels"].items()
    assert not list(find(member, "httpGet"))
    asked = objects["Service", "disagg-big-leaders"]["spec"]["selector"].items()
    assert asked <= leader["metadata"]["labels"].items()
    assert not asked <= member["metadata"]["labels"].items(), "routers would ask it"
    config = options_of(of_role(objects, "router"), objects, tmp_path)
    assert config.agg == ("dns+http://disagg-big-leaders:30000",)


def test_the_router_finds_workers_by_dns_or_by_name_where_they_have_certificates(tmp_path: Path) -> None:
    config = options_of(of_role(made(PLAIN), "router"), made(PLAIN), tmp_path)
    assert config.prefill == ("dns+http://disagg-prefill:30000",)
    config = options_of(of_role(made(MUTUAL), "router"), made(MUTUAL), tmp_path)
    assert config.prefill == ("https://disagg-prefill-0.disagg-prefill:30000",)
    assert len(config.decode) == 3, "as many as there may be"
    config = options_of(of_role(made(OPEN), "router"), made(OPEN), tmp_path)
    assert (config.prefill, config.etcd.endpoints) == ((), ["http://etcd:2379"])


def test_an_inference_pool_takes_the_pods_that_answer() -> None:
    objects = made(FULL)
    assert {name for kind, name in objects if kind == "InferencePool"} == {"disagg-decode", "disagg-big"}
    spec = objects["InferencePool", "disagg-decode"]["spec"]
    labels = of_role(objects, "decode")["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "sglang"
    assert spec["endpointPickerRef"]["name"] == "disagg-decode-epp"
    collector = Path(find_spec("sglang").origin).parent / "srt/observability/metrics_collector.py"  # type: ignore[union-attr,arg-type]
    for metric in ("num_queue_reqs", "num_running_reqs", "token_usage"):  # what a picker reads
        assert f'"sglang:{metric}"' in collector.read_text()


def test_prometheus_may_read_what_it_asks_for() -> None:
    objects = made(FULL)
    for name in ("pool", "prefill", "decode", "big", "router"):
        (endpoint,) = objects["PodMonitor", f"disagg-{name}"]["spec"]["podMetricsEndpoints"]
        policy = objects["NetworkPolicy", f"disagg-{name}"]["spec"]
        port = {"pool": 9100, "router": 8000}.get(name, 30000)
        source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        assert {"from": [source], "ports": [{"port": port}]} in policy["ingress"]
    assert endpoint["authorization"]["credentials"] == {"name": "pdserve-secrets", "key": "admin-key"}


def test_two_releases_in_a_namespace_share_no_object_and_no_pod() -> None:
    one, other = made(FULL, "one"), made(FULL, "other")
    assert not one.keys() & other.keys()
    for (kind, _), first in one.items():
        for labels in [
            *find(first, "matchLabels"),
            *([first["spec"]["selector"]] if kind == "Service" else []),
        ]:
            assert not any(labels.items() <= pod["metadata"]["labels"].items() for pod in pods(other))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "keys_file is needed"),
        ({**PLAIN, "pool": {"config": {"admin_token": "x"}}}, "secret in plain text"),
        ({"router": {"config": {**KEYS, "admin": {"key": "x"}}}}, "secret in plain text"),
        (
            {**PLAIN, "pool": {"env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}]}},
            "AWS_SECRET_ACCESS_KEY is a secret in plain text",
        ),
        ({**PLAIN, "workers": {"fast": {}}}, "role is prefill"),
        ({**PLAIN, "workers": {"decode": {"hosts": 2}}}, "trusted_network"),
        (
            {**PLAIN, "workers": {"decode": {"autoscale": {"max": 2}}, "more": {"role": "decode"}}},
            "has this role too",
        ),
        ({**PLAIN, "pool": {"tiers": [{"kind": "ssd", "capacity_bytes": "1GiB"}]}}, "needs a volume"),
    ],
)
def test_what_cannot_run_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        made(values)
