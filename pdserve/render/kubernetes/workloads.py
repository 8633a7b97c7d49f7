"""StatefulSets of pool nodes and workers, the router's Deployment, and what belongs to each. Pure."""

from __future__ import annotations

from typing import Any, Final

from pdserve.render.kubernetes.containers import pod_spec, ports, tiers
from pdserve.render.kubernetes.contents import Content
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.render.kubernetes.several_hosts import API, KIND, leader_worker_set

Json = dict[str, Any]

JOB_LABEL: Final = "pdserve-job"
"""Of services: `router`, `worker` or `pool`, which the dashboards call `job`."""
ENGINE_LABELS: Final = {"llm-d.ai/engine-type": "sglang", "inference.networking.k8s.io/engine-type": "sglang"}
"""Of workers' pods: an endpoint picker reads their metrics by the names of this engine. The second name is
that of older pickers.
"""


def labels(cluster: Cluster, group: Group) -> dict[str, str]:
    """Of everything that belongs to a group, in Kubernetes' recommended names."""
    return {
        "app.kubernetes.io/name": "pdserve",
        "app.kubernetes.io/instance": cluster.name,
        "app.kubernetes.io/component": group.role,
    }


def selector(cluster: Cluster, group: Group) -> dict[str, str]:
    """The pods of this group alone, also those that have no role."""
    return {
        "app.kubernetes.io/name": "pdserve",
        "app.kubernetes.io/instance": cluster.name,
        "pdserve-group": group.name,
    }


def workload(cluster: Cluster, group: Group, content: Content) -> list[Json]:
    """All objects of one group."""
    engine = {} if group.role in ("router", "pool") else ENGINE_LABELS
    pods = {
        "metadata": {"labels": {**labels(cluster, group), **selector(cluster, group), **engine}},
        "spec": pod_spec(cluster, group, content),
    }
    if group.role == "router":
        made = [_deployment(cluster, group, pods), *_may_list_pods(cluster, group)]
    else:
        pods["spec"]["topologySpreadConstraints"] = [_spread(cluster, group)]
        made = [_ranked(cluster, group, pods) if group.nodes > 1 else _stateful_set(cluster, group, pods)]
    return [*made, _service(cluster, group), _disruptions(cluster, group)]


def _head(cluster: Cluster, group: Group, api: str, kind: str) -> Json:
    metadata = {"name": group.name, "labels": labels(cluster, group)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _deployment(cluster: Cluster, group: Group, pods: Json) -> Json:
    return {
        **_head(cluster, group, "apps/v1", "Deployment"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector(cluster, group)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pods,
        },
    }


def _stateful_set(cluster: Cluster, group: Group, pods: Json) -> Json:
    spec: Json = {
        "replicas": len(group.specs),
        "serviceName": group.name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector(cluster, group)},
        "template": pods,
    }
    if claims := [_claim(name, size_bytes) for name, _, size_bytes in tiers(group)]:
        spec["volumeClaimTemplates"] = claims
    return {**_head(cluster, group, "apps/v1", "StatefulSet"), "spec": spec}


def _ranked(cluster: Cluster, group: Group, pods: Json) -> Json:
    """Of workers whose ranks run on several hosts."""
    spec = leader_worker_set(group, pods, selector(cluster, group))
    return {**_head(cluster, group, API, KIND), "spec": spec}


def _claim(name: str, size_bytes: int) -> Json:
    """With a tenth more than the tier takes, for the file system. The class is the cluster's default."""
    size = f"{-(-size_bytes * 11 // 10 // (1 << 30))}Gi"
    return {
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


def _spread(cluster: Cluster, group: Group) -> Json:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(cluster, group)},
    }


def _service(cluster: Cluster, group: Group) -> Json:
    """The router's has an address. Those of the others only name their pods, also before they are ready: pool
    nodes find each other while they start.
    """
    made = _head(cluster, group, "v1", "Service")
    job = group.role if group.role in ("router", "pool") else "worker"
    made["metadata"]["labels"] = {**labels(cluster, group), **selector(cluster, group), JOB_LABEL: job}
    listed = [{"name": name, "port": number, "targetPort": name} for name, number in ports(group).items()]
    far: Json = {} if group.role == "router" else {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {**made, "spec": {**far, "selector": selector(cluster, group), "ports": listed}}


def _disruptions(cluster: Cluster, group: Group) -> Json:
    return {
        **_head(cluster, group, "policy/v1", "PodDisruptionBudget"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(cluster, group)}},
    }


def _may_list_pods(cluster: Cluster, group: Group) -> list[Json]:
    """The router's account, which may list and watch pods where it finds workers by them."""
    account = _head(cluster, group, "v1", "ServiceAccount")
    if not group.first.config.get("kubernetes"):
        return [account]
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    role = {**_head(cluster, group, "rbac.authorization.k8s.io/v1", "Role"), "rules": [rule]}
    binding = {
        **_head(cluster, group, "rbac.authorization.k8s.io/v1", "RoleBinding"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": group.name},
        "subjects": [{"kind": "ServiceAccount", "name": group.name}],
    }
    return [account, role, binding]
