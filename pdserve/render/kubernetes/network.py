"""NetworkPolicies: who may connect to whom, after the table of ports in docs/security.md. Pure.

Kubernetes closes a pod that a policy selects to all that no policy allows. So the first policy closes all
pods of the cluster, and each other one opens what one group serves.

| pods | are reached by |
|---|---|
| router | everybody, at its public port; the admin port is on loopback |
| workers | routers; with `handoff = "direct"` the other workers, at all ports |
| ranks on several hosts | the ranks of their group, at all ports |
| pool nodes | workers and pool nodes; routers at the control port. With `ucx.trusted_network` at all ports |

Pool nodes connect to nobody but each other, and to names' servers. Workers and routers connect where they
like: workers fetch images, and routers ask the API server.
"""

from __future__ import annotations

from typing import Any

from pdserve.render.kubernetes.containers import ports
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.render.kubernetes.workloads import labels, selector

Json = dict[str, Any]


def policies(cluster: Cluster) -> list[Json]:
    """All policies of a cluster."""
    everything = {"app.kubernetes.io/name": "pdserve", "app.kubernetes.io/instance": cluster.name}
    closed = {
        **_head(f"{cluster.name}-closed", everything),
        "spec": {"podSelector": {"matchLabels": everything}, "policyTypes": ["Ingress"]},
    }
    return [closed, *(_opened(cluster, group) for group in cluster.groups), *_outgoing(cluster)]


def _opened(cluster: Cluster, group: Group) -> Json:
    spec = {
        "podSelector": {"matchLabels": selector(cluster, group)},
        "policyTypes": ["Ingress"],
        "ingress": _ingress(cluster, group),
    }
    return {**_head(group.name, labels(cluster, group)), "spec": spec}


def _ingress(cluster: Cluster, group: Group) -> list[Json]:
    router, workers = cluster.of("router"), cluster.workers
    if group.role == "router":
        return [{"ports": _ports(group, "http")}]
    if group.role == "pool":
        peers = _peers(cluster, [*workers, *cluster.of("pool")])
        is_trusted = (group.first.config.get("ucx") or {}).get("trusted_network")
        inside: Json = (
            {"from": peers} if is_trusted else {"from": peers, "ports": _ports(group, "control", "pages")}
        )
        return [inside, {"from": _peers(cluster, router), "ports": _ports(group, "control")}]
    made = [{"from": _peers(cluster, router), "ports": _ports(group, "http")}]
    if group.first.config.get("handoff") == "direct":  # Mooncake and SGLang take ports of their own choice
        made.append({"from": _peers(cluster, workers)})
    if group.nodes > 1:  # torch and NCCL do, too
        made.append({"from": _peers(cluster, [group])})
    return made


def _outgoing(cluster: Cluster) -> list[Json]:
    """Of pool nodes, where they find each other by their names alone."""
    names = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    made = []
    for group in cluster.of("pool"):
        if (group.first.config.get("cluster") or {}).get("membership") == "etcd":
            continue
        spec = {
            "podSelector": {"matchLabels": selector(cluster, group)},
            "policyTypes": ["Egress"],
            "egress": [names, {"to": _peers(cluster, cluster.of("pool"))}],
        }
        made.append({**_head(f"{group.name}-outgoing", labels(cluster, group)), "spec": spec})
    return made


def _peers(cluster: Cluster, groups: list[Group]) -> list[Json]:
    return [{"podSelector": {"matchLabels": selector(cluster, group)}} for group in groups]


def _ports(group: Group, *names: str) -> list[Json]:
    return [{"port": ports(group)[name]} for name in names]


def _head(name: str, labelled: dict[str, str]) -> Json:
    metadata = {"name": name, "labels": labelled}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata}
