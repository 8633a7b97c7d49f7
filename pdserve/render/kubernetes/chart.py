"""The same objects as a Helm chart. Pure.

What differs between the places where a chart is installed is a value: the image, GPUs, the number of pods,
the class of volumes, and which components are wanted. Everything else stands as it is rendered. Texts that
hold braces of their own (dashboards) are files of the chart, which Helm does not read as templates.

A value's place holds a token while the object is written as YAML. The token is then replaced by Helm's words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdserve import __version__
from pdserve.render.kubernetes.containers import GPU, GPU_TOLERATION, IMAGE
from pdserve.render.kubernetes.contents import Content, content_of
from pdserve.render.kubernetes.gateway import inference_pools
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.render.kubernetes.network import policies
from pdserve.render.kubernetes.several_hosts import TEMPLATES
from pdserve.render.kubernetes.watching import autoscalers, monitors
from pdserve.render.kubernetes.workloads import workload
from pdserve.render.kubernetes.yaml_text import to_yaml
from pdserve.settings.toml_text import to_toml

Json = dict[str, Any]

CHECKSUM: Final = "checksum/config"
"""Annotation of pods: they are replaced when their configuration changes."""


class _Words:
    """Tokens in objects, and the words of Helm that take their places."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def token(self, words: str) -> str:
        self._words.append(words)
        return f"helm-words-{len(self._words) - 1}-"

    def text(self, *objects: Json) -> str:
        made = to_yaml(*objects)
        for number, words in enumerate(self._words):
            made = made.replace(f"helm-words-{number}-", words)
        return made


def chart_of(cluster: Cluster, dashboards: Mapping[str, str]) -> dict[str, str]:
    """Text by path. `dashboards`: Grafana's, by name of their file. Raises ConfigError."""
    contents = {group.name: content_of(cluster, group) for group in cluster.groups}
    made = {
        "Chart.yaml": to_yaml(_chart(cluster)),
        "values.yaml": to_yaml(_values(cluster)),
        "templates/network.yaml": to_yaml(*policies(cluster)),
        "templates/monitoring.yaml": _if("monitoring", to_yaml(*monitors(cluster, contents))),
        "templates/autoscaling.yaml": _if("autoscaling", to_yaml(*autoscalers(cluster))),
        "templates/gateway.yaml": _if("gateway", to_yaml(*inference_pools(cluster))),
        "templates/dashboards.yaml": _if("monitoring", _dashboards(cluster)),
    }
    for group in cluster.groups:
        made[f"templates/{group.name}.yaml"] = _group(cluster, group, contents[group.name])
        made[f"config/{group.name}.toml"] = to_toml(contents[group.name].tables)
    return made | {f"dashboards/{name}": text for name, text in dashboards.items()}


def _chart(cluster: Cluster) -> Json:
    return {
        "apiVersion": "v2",
        "name": cluster.name,
        "description": "A cluster of pdserve, rendered from its cluster file",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
    }


def _values(cluster: Cluster) -> Json:
    return {
        "image": {"name": IMAGE, "tag": f"{__version__}-cpu"},
        "gpus": False,
        "storageClass": "",
        "replicas": {group.name: len(group.specs) for group in cluster.groups},
        "components": {"monitoring": False, "autoscaling": False, "gateway": False},
    }


def _if(component: str, text: str) -> str:
    return f"{{{{- if .Values.components.{component} }}}}\n{text}{{{{- end }}}}\n"


def _group(cluster: Cluster, group: Group, content: Content) -> str:
    words = _Words()
    objects = workload(cluster, group, content)
    spec = objects[0]["spec"]
    spec["replicas"] = words.token(f'{{{{ index .Values.replicas "{group.name}" }}}}')
    digest = hashlib.sha256(to_toml(content.tables).encode()).hexdigest()
    for template in _templates(spec):
        template["metadata"]["annotations"] = {CHECKSUM: digest}
        (container,) = template["spec"]["containers"]
        container["image"] = words.token("{{ .Values.image.name }}:{{ .Values.image.tag }}")
        if count := group.first.needs.gpus or group.gpus:
            with_gpus = container["resources"] | {"limits": {GPU: count}}
            container["resources"] = words.token(_either(with_gpus, container["resources"]))
            template["spec"]["tolerations"] = words.token(_either([GPU_TOLERATION], []))
    for claim in spec.get("volumeClaimTemplates", ()):
        claim["spec"]["storageClassName"] = words.token("{{ .Values.storageClass | default nil | toJson }}")
    text = words.text(*objects)
    config = f'{{{{ .Files.Get "config/{group.name}.toml" | quote }}}}'
    head = to_yaml({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": group.name}})
    return f"{text}---\n{head}data:\n  {group.role}.toml: {config}\n"


def _templates(spec: Json) -> Iterator[Json]:
    """Of pods."""
    if "template" in spec:
        yield spec["template"]
    else:
        yield from (spec["leaderWorkerTemplate"][name] for name in TEMPLATES)


def _either(with_gpus: Any, without: Any) -> str:
    return f"{{{{ ternary `{json.dumps(with_gpus)}` `{json.dumps(without)}` .Values.gpus }}}}"


def _dashboards(cluster: Cluster) -> str:
    labels = {"grafana_dashboard": "1"}
    metadata = {"name": f"{cluster.name}-dashboards", "labels": labels}
    head = to_yaml({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    return f'{head}data:\n{{{{ (.Files.Glob "dashboards/*.json").AsConfig | indent 2 }}}}\n'
