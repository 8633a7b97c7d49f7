"""Components that need more than Kubernetes itself: monitoring (Prometheus' operator), and scaling by
"workers wanted" (an adapter that gives Prometheus' metrics to Kubernetes). Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pdserve.render.kubernetes.containers import SECRET, ports
from pdserve.render.kubernetes.contents import Content
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.render.kubernetes.several_hosts import API, KIND
from pdserve.render.kubernetes.workloads import JOB_LABEL, labels, selector

Json = dict[str, Any]

MONITORING: Final = "monitoring"
"""Namespace of Prometheus."""
WANTED: Final = "pdserve_router_workers_wanted"
INSTANCE: Final = "app.kubernetes.io/instance"
"""Label of a service that Prometheus gives to its metrics, so that two clusters differ."""
ADAPTER_RULES: Final = {
    "externalRules": [
        {
            "seriesQuery": f'{WANTED}{{role!=""}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
            "metricsQuery": "max(<<.Series>>{<<.LabelMatchers>>}) by (role)",
        }
    ]
}
"""Of Prometheus' adapter. Each router says how many workers are wanted in all, so they are not added up."""
MOST: Final = 4
"""The autoscaler may make this many times the workers of the cluster file."""


def monitors(cluster: Cluster, contents: dict[str, Content]) -> list[Json]:
    """A ServiceMonitor for each group, and policies that let Prometheus reach its metrics."""
    made = []
    for group in cluster.groups:
        head = {"name": group.name, "labels": labels(cluster, group)}
        selects = {"matchLabels": selector(cluster, group)}
        spec = {
            "jobLabel": JOB_LABEL,
            "targetLabels": [INSTANCE],
            "selector": selects,
            "endpoints": [_endpoint(group, contents[group.name])],
        }
        made.append(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "ServiceMonitor",
                "metadata": head,
                "spec": spec,
            }
        )
    for group in cluster.groups:
        source = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}}
        spec = {
            "podSelector": {"matchLabels": selector(cluster, group)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [source], "ports": [{"port": ports(group)[_port(group)]}]}],
        }
        head = {"name": f"{group.name}-metrics", "labels": labels(cluster, group)}
        made.append(
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": head, "spec": spec}
        )
    return made


def _endpoint(group: Group, content: Content) -> Json:
    """Where and how Prometheus asks. A router with API keys shows its metrics to the admin key alone."""
    tables = content.tables
    made: Json = {
        "port": _port(group),
        "path": "/metrics",
        "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "process"}],
    }
    table, key = ("access", "tls_cert_file") if group.role == "router" else ("tls", "certificate")
    if group.role != "pool" and (tables.get(table) or {}).get(key):
        made |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    file = tables.get("metrics_token_file")
    if group.role == "router" and (tables.get("access") or {}).get("keys_file"):
        file = tables["admin"]["key_file"]
    if file:
        name = file.rpartition("/")[2]
        made["authorization"] = {"type": "Bearer", "credentials": {"name": SECRET, "key": name}}
    return made


def _port(group: Group) -> str:
    return "metrics" if group.role == "pool" else "http"


def autoscalers(cluster: Cluster) -> list[Json]:
    """One for each role of workers: as many as the router says are wanted of it. Roles with several groups
    are left out, because each group would follow the number of all.
    """
    return [_autoscaler(cluster, group) for group in cluster.workers if len(cluster.of(group.role)) == 1]


def _autoscaler(cluster: Cluster, group: Group) -> Json:
    labelled = {"role": group.role, re.sub(r"[./]", "_", INSTANCE): cluster.name}
    wanted = {"name": WANTED, "selector": {"matchLabels": labelled}}
    metric = {
        "type": "External",
        "external": {"metric": wanted, "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    api, kind = (API, KIND) if group.nodes > 1 else ("apps/v1", "StatefulSet")
    slowly = {
        "stabilizationWindowSeconds": 600,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": group.name, "labels": labels(cluster, group)},
        "spec": {
            "scaleTargetRef": {"apiVersion": api, "kind": kind, "name": group.name},
            "minReplicas": 1,
            "maxReplicas": MOST * len(group.specs),
            "metrics": [metric],
            "behavior": {"scaleDown": slowly},
        },
    }
