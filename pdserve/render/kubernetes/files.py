"""All files of a rendered cluster, as text. Pure, but for `write`.

base/                    workloads, services, policies, configuration
secrets/                 a Secret of files that are put beside its kustomization, and never committed
overlays/cpu, gpu        the image, and GPUs
components/monitoring    ServiceMonitors and dashboards
components/autoscaling   HorizontalPodAutoscalers
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from pdserve import __version__
from pdserve.errors import StartupError
from pdserve.render.kubernetes.containers import IMAGE, SECRET
from pdserve.render.kubernetes.contents import SECRETS_DIR, content_of
from pdserve.render.kubernetes.groups import Cluster
from pdserve.render.kubernetes.network import policies
from pdserve.render.kubernetes.watching import MONITORING, autoscalers, monitors
from pdserve.render.kubernetes.workloads import workload
from pdserve.settings.toml_text import to_toml

Json = dict[str, Any]

CONFIG_API: Final = "kustomize.config.k8s.io/v1beta1"
COMPONENT_API: Final = "kustomize.config.k8s.io/v1alpha1"
GPU: Final = "nvidia.com/gpu"
README: Final = """\
# {name} on Kubernetes

Written by `pdserve render kubernetes`. Render again after a change of the cluster file.

1. Put these files into `secrets/`. They are not committed. `pdserve key` writes API keys, and
   `openssl rand -hex 32` makes a token. Then `kubectl apply -k secrets`.

| file | what it is |
|---|---|
{rows}

2. Make a claim named `models` of a volume with the models.
3. `kubectl apply -k overlays/cpu`, or `overlays/gpu`. The overlays name the image.

An overlay may list two components under `components`:

- `../../components/monitoring` needs Prometheus' operator in the namespace `{monitoring}`.
- `../../components/autoscaling` needs an adapter that serves `pdserve_router_workers_wanted` as an external
  metric.
"""


def files_of(cluster: Cluster, dashboards: Mapping[str, str]) -> dict[str, str]:
    """Text by path. `dashboards`: Grafana's, by name of their file. Raises ConfigError."""
    contents = {group.name: content_of(cluster, group) for group in cluster.groups}
    made: dict[str, str] = {}
    for group in cluster.groups:
        content = contents[group.name]
        made[f"base/{group.name}.yaml"] = _yaml(*workload(cluster, group, content))
        made[f"base/config/{group.name}.toml"] = to_toml(content.tables)
    made["base/network.yaml"] = _yaml(*policies(cluster))
    made["base/kustomization.yaml"] = _yaml(_base(cluster))
    secrets = dict(sorted(pair for content in contents.values() for pair in content.secrets))
    made["secrets/kustomization.yaml"] = _yaml(_secrets(secrets))
    made["secrets/.gitignore"] = "*\n!.gitignore\n!kustomization.yaml\n"
    made["overlays/cpu/kustomization.yaml"] = _yaml(_overlay("cpu"))
    made["overlays/gpu/kustomization.yaml"] = _yaml(_overlay("gpu") | {"patches": _gpu_patches(cluster)})
    made["components/monitoring/monitors.yaml"] = _yaml(*monitors(cluster, contents))
    made["components/monitoring/kustomization.yaml"] = _yaml(_monitoring(cluster, sorted(dashboards)))
    made |= {f"components/monitoring/{name}": text for name, text in dashboards.items()}
    made["components/autoscaling/autoscalers.yaml"] = _yaml(*autoscalers(cluster))
    made["components/autoscaling/kustomization.yaml"] = _yaml(_component("autoscalers.yaml"))
    made["README.md"] = _readme(cluster, secrets)
    return made


def write(files: Mapping[str, str], directory: Path) -> None:
    """Write them; other files there stay. Raises StartupError."""
    try:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(
            f"{directory}: cannot be written: {error.strerror}: choose another --out"
        ) from None


def _base(cluster: Cluster) -> Json:
    names = [group.name for group in cluster.groups]
    return {
        "apiVersion": CONFIG_API,
        "kind": "Kustomization",
        "resources": [*(f"{name}.yaml" for name in names), "network.yaml"],
        "configMapGenerator": [
            {"name": group.name, "files": [f"{group.role}.toml=config/{group.name}.toml"]}
            for group in cluster.groups
        ],
    }


def _secrets(secrets: Mapping[str, str]) -> Json:
    """Without a hash in its name: what was made in another way is found, too."""
    return {
        "apiVersion": CONFIG_API,
        "kind": "Kustomization",
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [{"name": SECRET, "files": list(secrets)}],
    }


def _overlay(kind: str) -> Json:
    return {
        "apiVersion": CONFIG_API,
        "kind": "Kustomization",
        "resources": ["../../base"],
        "images": [{"name": IMAGE, "newName": IMAGE, "newTag": f"{__version__}-{kind}"}],
    }


def _gpu_patches(cluster: Cluster) -> list[Json]:
    made = []
    for group in cluster.workers:
        if count := group.first.needs.gpus or group.gpus:
            limits = {"limits": {GPU: count}}
            pod = {
                "containers": [{"name": group.role, "resources": limits}],
                "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
            }
            patch = {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": group.name},
                "spec": {"template": {"spec": pod}},
            }
            made.append({"patch": _yaml(patch)})
    return made


def _component(*resources: str) -> Json:
    return {"apiVersion": COMPONENT_API, "kind": "Component", "resources": list(resources)}


def _monitoring(cluster: Cluster, dashboards: list[str]) -> Json:
    made = _component("monitors.yaml")
    if dashboards:
        options = {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}}
        name = f"{cluster.name}-dashboards"
        made["configMapGenerator"] = [{"name": name, "files": dashboards, "options": options}]
    return made


def _readme(cluster: Cluster, secrets: Mapping[str, str]) -> str:
    """What has to be there before, and the commands."""
    rows = []
    for name, path in secrets.items():
        origin = "yours" if path.startswith(SECRETS_DIR) else f"a copy of `{path}`"
        rows.append(f"| `secrets/{name}` | {origin} |")
    return README.format(name=cluster.name, rows="\n".join(rows), monitoring=MONITORING)


class _Text(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Plain YAML: no aliases, long texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Text.add_representer(str, _represent_text)


def _yaml(*documents: Json) -> str:
    """Keys in the order in which they were put, so that the text is the same each time."""
    text: str = yaml.dump_all(
        documents, Dumper=_Text, sort_keys=False, width=110, explicit_start=len(documents) > 1
    )
    return text
