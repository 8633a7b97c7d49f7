"""`pdserve render kubernetes`: files that Kubernetes' schemas take, that name nothing that is not there, and
that hold no secret.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.render.cli import app
from pdserve.render.kubernetes.gateway import READ
from pdserve.router.config.router import RouterConfig
from pdserve.settings.config_file import load_config

LAUNCH = Path(__file__).parents[2] / "launch"
FOREIGN = {"ServiceMonitor", "Kustomization", "Component", "InferencePool", "LeaderWorkerSet"}
"""Kinds that are not Kubernetes' own."""
NO_OBJECTS = {"names.yaml", "adapter-rules.yaml"}
"""Settings of other programs."""
ALL = ("monitoring", "autoscaling", "gateway", "local-nvme")
"""Components."""
COMPONENTS = ("monitoring", "autoscaling", "gateway")
"""Of a chart."""
TIER = 'tiers = [{ kind = "ssd", path = "pages", capacity_bytes = "100GiB" }]\n'
NODES = ("--", "--tp-size", "16", "--nnodes", "2")
MEETING = "$(LWS_LEADER_ADDRESS):20000"
MODEL = "/models/qwen3-8b"
ROUTES = {"/pd/ready", "/ready", "/health"}


def several_hosts_file(directory: Path) -> Path:
    """The same, in a network that ranks may talk over."""
    file = cluster_file(directory)
    file.write_text(re.sub(r"(\[worker\.engine\].*\n)", r"\1trusted_network = true\n", file.read_text()))
    return file


def cluster_file(directory: Path, more: str = "", keys: str = 'access = { keys_file = "keys" }') -> Path:
    """The cluster of launch/disagg.toml, with keys."""
    for name in ("disagg.toml", "router.toml", "pool-node.toml"):
        shutil.copy(LAUNCH / name, directory)
    file = directory / "disagg.toml"
    file.write_text(file.read_text().replace("[router]\n", f"[router]\n{keys}\n", 1) + more)
    return file


def render(file: Path, out: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["kubernetes", str(file), "--out", str(out), "--model", MODEL, *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("render")
    render(cluster_file(directory), directory / "out")
    return directory / "out"


def documents(directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(directory.rglob("*.yaml")):
        if path.name in NO_OBJECTS:
            continue
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


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


def test_kubernetes_schemas_take_every_object(rendered: Path) -> None:
    kinds = set()
    for _, document in documents(rendered):
        kinds.add(document["kind"])
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    assert {"StatefulSet", "Service", "NetworkPolicy", "HorizontalPodAutoscaler"} <= kinds


def test_a_schema_refuses_what_is_wrong(rendered: Path) -> None:
    _, document = next(pair for pair in documents(rendered) if pair[1]["kind"] == "StatefulSet")
    document["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_same_cluster_file_gives_the_same_files(rendered: Path, tmp_path: Path) -> None:
    render(cluster_file(tmp_path), tmp_path / "out")
    texts = [
        {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
        for root in (rendered, tmp_path / "out")
    ]
    assert texts[0] == texts[1]


def test_what_a_file_names_is_there(rendered: Path) -> None:
    for path, document in documents(rendered):
        for name in [*document.get("resources", []), *document.get("components", [])]:
            assert (path.parent / name).exists(), f"{path}: {name}"
        for generator in document.get("configMapGenerator", []):
            for named in generator["files"]:
                assert (path.parent / named.rpartition("=")[2]).is_file(), f"{path}: {named}"


def test_pods_mount_the_configuration_and_secrets_that_are_made(rendered: Path) -> None:
    base = yaml.safe_load((rendered / "base/kustomization.yaml").read_text())
    secrets = yaml.safe_load((rendered / "secrets/kustomization.yaml").read_text())
    (secret,) = secrets["secretGenerator"]
    maps = {one["name"] for one in base["configMapGenerator"]}
    pods = [
        one["spec"]["template"]["spec"]
        for _, one in documents(rendered / "base")
        if "template" in one.get("spec", {})
    ]
    assert len(pods) == 4
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {one["name"] for one in find(pod["volumes"], "configMap")} <= maps
        for one in find(pod["volumes"], "secret"):
            assert one["secretName"] == secret["name"]
            assert {item["key"] for item in one["items"]} <= set(secret["files"])
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_probes_ask_routes_that_there_are(rendered: Path) -> None:
    asked = {
        probe["path"] for _, document in documents(rendered / "base") for probe in find(document, "httpGet")
    }
    assert asked
    assert asked <= ROUTES


def test_nobody_is_root_and_file_systems_are_read_only(rendered: Path) -> None:
    contexts = [
        one for _, document in documents(rendered / "base") for one in find(document, "securityContext")
    ]
    assert any(one.get("runAsNonRoot") for one in contexts)
    containers = [one for one in contexts if "readOnlyRootFilesystem" in one]
    assert len(containers) == 4
    assert all(one["readOnlyRootFilesystem"] and not one["allowPrivilegeEscalation"] for one in containers)


def test_the_routers_configuration_is_one_and_finds_workers_by_their_pods(
    rendered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(RouterConfig, rendered / "base/config/disagg-router.toml", {})
    assert config.kubernetes.selector.endswith("component in (prefill,decode,agg,elastic)")
    assert str(config.access.keys_file).startswith("/etc/pdserve/secrets/")


def test_a_gpu_overlay_gives_each_worker_its_gpus(tmp_path: Path) -> None:
    render(cluster_file(tmp_path), tmp_path / "out", "--", "--tp-size", "4")
    overlay = (tmp_path / "out/overlays/gpu/kustomization.yaml").read_text()
    assert overlay.count("nvidia.com/gpu: 4") == 2


def test_no_secret_is_written(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-very-secret-key tenant\n")
    render(cluster_file(tmp_path), tmp_path / "out")
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any("sk-very-secret-key" in text for text in texts)


@pytest.mark.parametrize(
    ("more", "keys", "said"),
    [
        ("", "", "keys_file"),
        ('\n[[command]]\nargv = ["x"]\n', 'access = { keys_file = "keys" }', "commands"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, more: str, keys: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render(cluster_file(tmp_path, more, keys), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def objects(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [document for _, document in documents(directory) if document["kind"] == kind]


def test_an_inference_pool_takes_the_pods_that_answer_and_names_its_picker(rendered: Path) -> None:
    (pool,) = objects(rendered / "components/gateway", "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert spec.keys() == {"selector", "targetPorts", "endpointPickerRef"}
    (decode,) = [
        one for one in objects(rendered / "base", "StatefulSet") if "decode" in one["metadata"]["name"]
    ]
    pods = decode["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (port,) = spec["targetPorts"]
    assert port["number"] in [one["containerPort"] for one in pods["spec"]["containers"][0]["ports"]]
    reference = spec["endpointPickerRef"]
    assert reference["port"].keys() == {"number"}, "a service is named with its port"
    assert reference["failureMode"] in ("FailOpen", "FailClose")
    assert pods["metadata"]["labels"]["llm-d.ai/engine-type"] == "sglang"


def test_pickers_read_metrics_that_sglang_has() -> None:
    collector = Path(find_spec("sglang").origin).parent / "srt/observability/metrics_collector.py"
    assert [name for name in READ if f'"{name}"' not in collector.read_text()] == []


def test_ranks_on_several_hosts_are_groups_of_pods_of_which_one_is_a_worker(tmp_path: Path) -> None:
    render(several_hosts_file(tmp_path), tmp_path / "out", *NODES)
    sets = objects(tmp_path / "out/base", "LeaderWorkerSet")
    assert {one["metadata"]["name"] for one in sets} == {"disagg-prefill", "disagg-decode"}
    config = load_config(RouterConfig, tmp_path / "out/base/config/disagg-router.toml", {})
    for one in sets:
        template = one["spec"]["leaderWorkerTemplate"]
        assert template["size"] == 2
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        leader, member = template["leaderTemplate"], template["workerTemplate"]
        for pods in (leader, member):
            as_stateful_set(pods)
            words = pods["spec"]["containers"][0]["args"]
            assert words[-5] == "--"
            assert words[-4:] == ["--node-rank", "$(LWS_WORKER_INDEX)", "--dist-init-addr", MEETING]
            assert "httpGet" not in member["spec"]["containers"][0]["readinessProbe"]
        assert config.kubernetes.role_label in leader["metadata"]["labels"]
        assert config.kubernetes.role_label not in member["metadata"]["labels"], "routers would ask it"
        (service,) = [
            service
            for service in objects(tmp_path / "out/base", "Service")
            if service["metadata"]["name"] == one["metadata"]["name"]
        ]
        for pods in (leader, member):  # found by name, before any of them is ready
            assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
        assert service["spec"]["publishNotReadyAddresses"]
    text = (tmp_path / "out/base/config/disagg-decode.toml").read_text()
    assert '"--nnodes",\n    "2",' in text


def as_stateful_set(template: dict[str, Any]) -> None:
    """Kubernetes' schema takes the template."""
    labels = template["metadata"]["labels"]
    spec = {"serviceName": "x", "selector": {"matchLabels": labels}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)


def test_what_kubernetes_says_of_ranks_is_not_said_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--node-rank is given by Kubernetes"):
        render(several_hosts_file(tmp_path), tmp_path / "out", *NODES, "--node-rank", "0")


def test_ranks_talk_over_a_network_that_somebody_trusts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.trusted_network"):
        render(cluster_file(tmp_path), tmp_path / "out", *NODES)


def kustomized(directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@NEEDS_KUBECTL
def test_the_cpu_overlay_is_the_base_but_for_the_image_and_the_names_of_configurations(
    rendered: Path,
) -> None:
    """So those who run the base's pods, as tests do, run what a user applies."""
    base = {
        (one["kind"], one["metadata"]["name"]): one
        for _, one in documents(rendered / "base")
        if one["kind"] != "Kustomization"
    }
    overlay = {(one["kind"], one["metadata"]["name"]): one for one in kustomized(rendered / "overlays/cpu")}
    for one in overlay.values():
        for container in (c for found in find(one, "containers") for c in found):
            container["image"] = container["image"].partition(":")[0]
        for named in find(one, "configMap"):
            named["name"] = named["name"].rpartition("-")[0]
    maps = {name: one["data"] for (kind, name), one in overlay.items() if kind == "ConfigMap"}
    assert {key: one for key, one in overlay.items() if key[0] != "ConfigMap"} == base
    assert {name.rpartition("-")[0]: "".join(data.values()) for name, data in maps.items()} == {
        path.stem: path.read_text() for path in (rendered / "base/config").iterdir()
    }


@NEEDS_KUBECTL
@pytest.mark.parametrize(("overlay", "words"), [("cpu", ()), ("gpu", ()), ("gpu", NODES)])
def test_kustomize_takes_an_overlay_with_all_components(
    tmp_path: Path, overlay: str, words: tuple[str, ...]
) -> None:
    file = several_hosts_file(tmp_path)
    file.write_text(file.read_text().replace("[[pool]]\n", f"[[pool]]\n{TIER}", 1))
    render(file, tmp_path / "out", *words)
    mine = tmp_path / "out/overlays/mine/kustomization.yaml"
    mine.parent.mkdir()
    components = [f"../../components/{name}" for name in ALL]
    mine.write_text(yaml.safe_dump({"resources": [f"../{overlay}"], "components": components}))
    built = kustomized(mine.parent)
    for one in built:
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    maps = {one["metadata"]["name"] for one in built if one["kind"] == "ConfigMap"}
    named = {name["name"] for one in built for name in find(one, "configMap")}
    assert named
    assert named <= maps, "names of generated maps have a hash, wherever they are named"
    images = {name for one in built for name in find(one, "image")}
    assert images == {f"pdserve:{__version__}-{overlay}"}
    (pool,) = [one for one in built if one["kind"] == "StatefulSet" and "pool" in one["metadata"]["name"]]
    (claim,) = pool["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] in [
        one["metadata"]["name"] for one in built if one["kind"] == "StorageClass"
    ]
    gpus = [count for one in built for count in find(one, "nvidia.com/gpu")]
    assert gpus == {"cpu": [], "gpu": [8] * 4 if words else [1] * 2}[overlay]


@pytest.mark.parametrize("words", [(), NODES])
def test_a_chart_makes_what_kustomize_makes(tmp_path: Path, words: tuple[str, ...]) -> None:
    file = several_hosts_file(tmp_path)
    render(file, tmp_path / "out", *words)
    made = CliRunner().invoke(
        app, ["helm", str(file), "--out", str(tmp_path / "disagg"), "--model", MODEL, *words]
    )
    assert made.exception is None, made.output
    said = helm.lint(tmp_path / "disagg")
    assert (said["errors"], [one["error"] for one in said["messages"]]) == ([], ["icon is recommended"])
    with helm.Chart.load(tmp_path / "disagg") as chart:
        plain = built(chart.render({}, name="x"))
        given = {"gpus": True, "replicas": {"disagg-decode": 3}, "image": {"tag": "mine"}}
        full = built(chart.render({**given, "components": dict.fromkeys(COMPONENTS, True)}, name="x"))
    base = {
        (one["kind"], one["metadata"]["name"])
        for _, one in documents(tmp_path / "out/base")
        if one["kind"] != "Kustomization"
    }
    maps = {("ConfigMap", f"disagg-{name}") for name in ("pool", "prefill", "decode", "router")}
    assert plain.keys() == base | maps
    decode = "LeaderWorkerSet" if words else "StatefulSet"
    assert full[decode, "disagg-decode"]["spec"]["replicas"] == 3
    assert {image for one in full.values() for image in find(one, "image")} == {"pdserve:mine"}
    assert sum(1 for one in full.values() for _ in find(one, "nvidia.com/gpu")) == (4 if words else 2)
    assert {"InferencePool", "ServiceMonitor", "HorizontalPodAutoscaler"} <= {kind for kind, _ in full}
    text = full["ConfigMap", "disagg-pool"]["data"]["pool.toml"]
    assert text == (tmp_path / "out/base/config/disagg-pool.toml").read_text()
    dashboards = full["ConfigMap", "disagg-dashboards"]["data"]
    assert dashboards["pool.json"] == (LAUNCH / "grafana/pool.json").read_text()
    for one in full.values():
        if one["kind"] not in FOREIGN:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def built(texts: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """What Helm wrote, by kind and name."""
    made = [one for text in texts.values() for one in yaml.safe_load_all(text) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in made}
