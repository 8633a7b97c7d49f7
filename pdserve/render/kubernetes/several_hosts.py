"""Workers whose ranks run on several hosts (SGLang's `--nnodes`): a LeaderWorkerSet. Pure.

Each worker is a group of pods. The leader has the first ranks, the HTTP server and the worker's role, by
which routers find it. The others have the rest of the ranks, and no role. They end when the leader ends its
ranks. A pod that restarts restarts its whole group, because ranks cannot join again.

The set's controller gives each pod its number and the leader's address. Kubernetes puts them into the words
for SGLang.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from pdserve.render.kubernetes.containers import GPU, GPU_TOLERATION
from pdserve.render.kubernetes.groups import Cluster, Group

Json = dict[str, Any]

MEETING_PORT: Final = 20000
"""Of the leader, where ranks find each other."""
RANK_WORDS: Final = (
    "--node-rank",
    "$(LWS_WORKER_INDEX)",
    "--dist-init-addr",
    f"$(LWS_LEADER_ADDRESS):{MEETING_PORT}",
)
TEMPLATES: Final = ("leaderTemplate", "workerTemplate")
API: Final = "leaderworkerset.x-k8s.io/v1"
KIND: Final = "LeaderWorkerSet"
CONFIG_MAP_NAMES: Final = {
    "nameReference": [
        {
            "kind": "ConfigMap",
            "version": "v1",
            "fieldSpecs": [
                {
                    "kind": KIND,
                    "path": f"spec/leaderWorkerTemplate/{template}/spec/volumes/configMap/name",
                }
                for template in TEMPLATES
            ],
        }
    ]
}
"""Tells Kustomize where such a set names a ConfigMap, to whose name it adds a hash."""


def several_hosts(cluster: Cluster) -> list[Group]:
    """The groups of such workers."""
    return [group for group in cluster.workers if group.nodes > 1]


def leader_worker_set(group: Group, pods: Json, member_labels: dict[str, str]) -> Json:
    """`spec` of the set. `pods`: template of the leader. `member_labels`: of pods that are in the group and
    have no role.
    """
    leader = copy.deepcopy(pods)
    (container,) = leader["spec"]["containers"]
    container["args"] = [*container["args"], "--", *RANK_WORDS]
    member = copy.deepcopy(leader)
    member["metadata"]["labels"] = member_labels
    (container,) = member["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[name].pop("httpGet", None)
        container[name] = {"tcpSocket": {"port": "http"}, **container[name]}
    return {
        "replicas": len(group.specs),
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        "leaderWorkerTemplate": {
            "size": group.nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": leader,
            "workerTemplate": member,
        },
    }


def gpu_steps(count: int) -> list[Json]:
    """A JSON patch that gives GPUs to all pods: Kustomize replaces whole lists of kinds that are not
    Kubernetes' own.
    """
    made: list[Json] = []
    for template in TEMPLATES:
        pod = f"/spec/leaderWorkerTemplate/{template}/spec"
        limits = {"op": "add", "path": f"{pod}/containers/0/resources/limits", "value": {GPU: count}}
        made += [limits, {"op": "add", "path": f"{pod}/tolerations", "value": [GPU_TOLERATION]}]
    return made
