"""The Gateway API inference extension: an InferencePool for each group of workers that answer. Pure.

A gateway sends a request to a pool, and the pool's endpoint picker names the pod. The picker is another
project's; it is installed beside the pool, and is not written here. It reads the workers' `/metrics`. A label
of their pods says that they have the names of SGLang (model server protocol, proposal 003):

| what the picker reads | metric of a worker |
|---|---|
| requests that wait | `sglang:num_queue_reqs` |
| requests that run | `sglang:num_running_reqs` |
| share of the KV cache in use | `sglang:token_usage` |

Such requests pass the router by: its keys, limits, placement and prefill workers are not used. The workers
still share the pool. Prefill workers are in no InferencePool, because they answer no whole request.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.render.kubernetes.containers import ports
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.render.kubernetes.workloads import labels, selector
from pdserve.up.config import Role

Json = dict[str, Any]

READ: Final = ("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage")
"""What the picker reads of a worker that calls itself SGLang."""
ANSWERING: Final[tuple[Role, ...]] = ("decode", "agg", "elastic")
GATEWAY: Final = "gateway"
"""Namespace of the gateway's proxies."""
PICKER_PORT: Final = 9002
"""Of the picker's service, as its chart sets it."""


def answering(cluster: Cluster) -> list[Group]:
    """The groups that get a pool."""
    return cluster.of(*ANSWERING)


def inference_pools(cluster: Cluster) -> list[Json]:
    """The pools, and policies that let proxies and pickers reach the workers."""
    return [made for group in answering(cluster) for made in (_pool(cluster, group), _policy(cluster, group))]


def picker(group: Group) -> str:
    """Name of the picker's service, as the picker's chart makes it of the pool's name."""
    return f"{group.name}-epp"


def _pool(cluster: Cluster, group: Group) -> Json:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": group.name, "labels": labels(cluster, group)},
        "spec": {
            "selector": {"matchLabels": {**labels(cluster, group), **selector(cluster, group)}},
            "targetPorts": [{"number": ports(group)["http"]}],
            # without a picker any worker answers: the pool has the pages
            "endpointPickerRef": {
                "name": picker(group),
                "port": {"number": PICKER_PORT},
                "failureMode": "FailOpen",
            },
        },
    }


def _policy(cluster: Cluster, group: Group) -> Json:
    proxies = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": GATEWAY}}}
    pickers = {"podSelector": {"matchLabels": {"inferencepool": picker(group)}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{group.name}-gateway", "labels": labels(cluster, group)},
        "spec": {
            "podSelector": {"matchLabels": selector(cluster, group)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [proxies, pickers], "ports": [{"port": ports(group)["http"]}]}],
        },
    }
