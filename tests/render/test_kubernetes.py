"""`pdserve render kubernetes`: files that Kubernetes' schemas take, that name nothing that is not there, and
that hold no secret.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.render.cli import app
from pdserve.router.config.router import RouterConfig
from pdserve.settings.config_file import load_config

LAUNCH = Path(__file__).parents[2] / "launch"
FOREIGN = {"ServiceMonitor", "PodMonitor", "Kustomization", "Component"}
"""Kinds that are not Kubernetes' own."""
MODEL = "/models/qwen3-8b"
ROUTES = {"/pd/ready", "/ready", "/health"}


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
    assert config.kubernetes.selector
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
        ('\n[[vllm]]\nmodel = "m"\n', 'access = { keys_file = "keys" }', "vLLM"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, more: str, keys: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render(cluster_file(tmp_path, more, keys), tmp_path / "out")
    assert not (tmp_path / "out").exists()
