"""All files of a rendered cluster, as text. Pure, but for `write`.

base/                    workloads, services, policies, configuration
secrets/                 a Secret of files that are put beside its kustomization, and never committed
overlays/cpu, gpu        the image, and GPUs
components/monitoring    ServiceMonitors and dashboards
components/autoscaling   HorizontalPodAutoscalers
components/gateway       InferencePools, for a gateway that sends requests to workers
components/local-nvme    tiers of pool nodes on disks of their hosts
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pdserve import __version__
from pdserve.errors import StartupError
from pdserve.render.kubernetes.containers import GPU, GPU_TOLERATION, IMAGE, SECRET
from pdserve.render.kubernetes.contents import SECRETS_DIR, content_of
from pdserve.render.kubernetes.gateway import GATEWAY, answering, inference_pools, picker
from pdserve.render.kubernetes.groups import Cluster
from pdserve.render.kubernetes.network import policies
from pdserve.render.kubernetes.several_hosts import CONFIG_MAP_NAMES, KIND, gpu_steps, several_hosts
from pdserve.render.kubernetes.storage import CLASS, claim_patches, storage_class
from pdserve.render.kubernetes.watching import ADAPTER_RULES, MONITORING, autoscalers, monitors
from pdserve.render.kubernetes.workloads import workload
from pdserve.render.kubernetes.yaml_text import to_yaml
from pdserve.settings.toml_text import to_toml

Json = dict[str, Any]

CONFIG_API: Final = "kustomize.config.k8s.io/v1beta1"
COMPONENT_API: Final = "kustomize.config.k8s.io/v1alpha1"
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

An overlay may list components under `components`:

- `../../components/monitoring` needs Prometheus' operator in the namespace `{monitoring}`.
- `../../components/autoscaling` needs Prometheus' adapter with the rules in its `adapter-rules.yaml`.
- `../../components/gateway` needs the Gateway API inference extension, proxies in the namespace
  `{gateway}`, and an endpoint picker for each pool: {pickers}. These requests do not pass the router. So a
  route to a pool must show the workers' token: `Authorization: Bearer`, and the text of
  `secrets/cluster-token`.
{storage}"""
LOCAL_NVME: Final = f"""\
- `../../components/local-nvme` puts tiers on disks of the hosts: volumes of the class `{CLASS}`.
"""


def files_of(cluster: Cluster, dashboards: Mapping[str, str]) -> dict[str, str]:
    """Text by path. `dashboards`: Grafana's, by name of their file. Raises ConfigError."""
    contents = {group.name: content_of(cluster, group) for group in cluster.groups}
    made: dict[str, str] = {}
    for group in cluster.groups:
        content = contents[group.name]
        made[f"base/{group.name}.yaml"] = to_yaml(*workload(cluster, group, content))
        made[f"base/config/{group.name}.toml"] = to_toml(content.tables)
    made["base/network.yaml"] = to_yaml(*policies(cluster))
    base = _base(cluster)
    if several_hosts(cluster):
        base["configurations"] = ["names.yaml"]
        made["base/names.yaml"] = to_yaml(CONFIG_MAP_NAMES)
    made["base/kustomization.yaml"] = to_yaml(base)
    secrets = dict(sorted(pair for content in contents.values() for pair in content.secrets))
    made["secrets/kustomization.yaml"] = to_yaml(_secrets(secrets))
    made["secrets/.gitignore"] = "*\n!.gitignore\n!kustomization.yaml\n"
    made["overlays/cpu/kustomization.yaml"] = to_yaml(_overlay("cpu"))
    made["overlays/gpu/kustomization.yaml"] = to_yaml(_overlay("gpu") | {"patches": _gpu_patches(cluster)})
    made["components/monitoring/monitors.yaml"] = to_yaml(*monitors(cluster, contents))
    made["components/monitoring/kustomization.yaml"] = to_yaml(_monitoring(cluster, sorted(dashboards)))
    made |= {f"components/monitoring/{name}": text for name, text in dashboards.items()}
    made["components/autoscaling/autoscalers.yaml"] = to_yaml(*autoscalers(cluster))
    made["components/autoscaling/kustomization.yaml"] = to_yaml(_component("autoscalers.yaml"))
    made["components/autoscaling/adapter-rules.yaml"] = to_yaml(ADAPTER_RULES)
    if pools := inference_pools(cluster):
        made["components/gateway/pools.yaml"] = to_yaml(*pools)
        made["components/gateway/kustomization.yaml"] = to_yaml(_component("pools.yaml"))
    if patches := claim_patches(cluster):
        made["components/local-nvme/class.yaml"] = to_yaml(storage_class())
        component = _component("class.yaml") | {"patches": patches}
        made["components/local-nvme/kustomization.yaml"] = to_yaml(component)
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
    made: list[Json] = []
    for group in cluster.workers:
        if count := group.first.needs.gpus or group.gpus:
            if group.nodes > 1:
                steps = gpu_steps(count)
                made.append({"target": {"kind": KIND, "name": group.name}, "patch": json.dumps(steps)})
                continue
            limits = {"limits": {GPU: count}}
            pod = {
                "containers": [{"name": group.role, "resources": limits}],
                "tolerations": [GPU_TOLERATION],
            }
            patch = {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": group.name},
                "spec": {"template": {"spec": pod}},
            }
            made.append({"patch": to_yaml(patch)})
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
    return README.format(
        name=cluster.name,
        rows="\n".join(rows),
        monitoring=MONITORING,
        gateway=GATEWAY,
        pickers=", ".join(f"`{picker(group)}`" for group in answering(cluster)),
        storage=LOCAL_NVME if claim_patches(cluster) else "",
    )
