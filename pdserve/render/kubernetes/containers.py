"""The pod of a group: its container's command, probes, stop hook, resources and volumes. Pure.

Probes ask the real routes. A worker's liveness is its port alone: SGLang's own watchdog ends a scheduler that
hangs, and `/health` of a worker that computes a long prompt may come late. Servers that ask for certificates
are probed by their ports alone, because the kubelet has none.

SIGTERM is the drain of a worker and of a router. A pool node drains in its stop hook, because its memory goes
with the pod.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pdserve.render.kubernetes.contents import MODELS_DIR, SECRETS_DIR, Content
from pdserve.render.kubernetes.groups import (
    CONFIG_DIR,
    CONTROL_PORT,
    HUGE_DIR,
    METRICS_PORT,
    PAGES_PORT,
    SHM_DIR,
    TIERS_DIR,
    Cluster,
    Group,
)
from pdserve.sizes import parse_bytes
from pdserve.up.plan import grace_s

Json = dict[str, Any]

IMAGE: Final = "pdserve"
"""A name that the overlays replace."""
GPU: Final = "nvidia.com/gpu"
GPU_TOLERATION: Final = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
USER: Final = 1000
SECRET: Final = "pdserve-secrets"
"""All secrets of a cluster. Each pod mounts those that its configuration names."""
PROBE_S: Final = 5
NODE_OVERHEAD_BYTES: Final = 2 << 30
"""Of a pool node's process beside its pages: the index, connections, and pages under way."""
WORKER_SHM: Final = "2Gi"
"""Queues between the processes of a worker; SGLang's host memory is not in it."""
ROUTER_NOTICE_S: Final = 5
"""Services name a pod for some moments after it was asked to end. The router serves meanwhile."""
POD: Final = "$(POD_NAME)"
"""Kubernetes puts the variable's value into the arguments."""


def pod_spec(cluster: Cluster, group: Group, content: Content) -> Json:
    """`spec` of a pod's template."""
    spec = group.first
    container: Json = {
        "name": group.role,
        "image": IMAGE,
        "args": arguments(group),
        "env": _environment(group),
        "ports": [{"name": name, "containerPort": number} for name, number in ports(group).items()],
        **_probes(cluster, group),
        "resources": _resources(group),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": _capabilities(group),
        },
        "volumeMounts": _mounts(group, content),
    }
    if hook := _stop_hook(cluster, group, content):
        container["lifecycle"] = {"preStop": {"exec": {"command": hook}}}
    made: Json = {
        "automountServiceAccountToken": group.role == "router",
        "terminationGracePeriodSeconds": math.ceil(
            grace_s(spec, cluster.plan.settings) + _hook_s(cluster, group)
        ),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes(group, content),
    }
    if group.role == "router":
        made["serviceAccountName"] = group.name
    if spec.needs.labels:
        made["nodeSelector"] = dict(spec.needs.labels)
    return made


def arguments(group: Group) -> list[str]:
    """After `pdserve`. What differs between pods is here, and not in the file."""
    command = ["pool", "serve"] if group.role == "pool" else [group.role]
    words = [*command, "--config", f"{CONFIG_DIR}/{group.role}.toml"]
    if group.role == "pool":
        address = f"tcp:{POD}.{group.name}:{CONTROL_PORT}"
        return [*words, "--name", POD, "--cluster.advertise", address]
    if group.role == "router":
        return words
    url = group.first.config["advertise"].replace(group.first.name, POD, 1)
    return [*words, "--advertise", url]


def ports(group: Group) -> dict[str, int]:
    """The container's ports by name. The admin port of the router is on loopback."""
    config = group.first.config
    if group.role == "pool":
        return {"control": CONTROL_PORT, "pages": PAGES_PORT, "metrics": METRICS_PORT}
    made = {"http": group.first.listening[0].port}
    if len(group.first.listening) > 1:
        made["bootstrap"] = int(config["direct"]["bootstrap_port"])
    return made


def capacity_bytes(group: Group) -> int:
    """Of one pool node."""
    return parse_bytes(group.first.config.get("capacity_bytes", "1GiB"))


def tiers(group: Group) -> list[tuple[str, str, int]]:
    """(name of the volume, where it is mounted, bytes) of a pool node's tiers."""
    found = group.first.config.get("tiers", []) if group.role == "pool" else []
    return [
        (f"tier{i}", f"{TIERS_DIR}/tier{i}", parse_bytes(tier["capacity_bytes"]))
        for i, tier in enumerate(found)
    ]


def _environment(group: Group) -> list[Json]:
    given = [{"name": name, "value": value} for name, value in sorted(group.first.env.items())]
    pod = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return [pod, {"name": "HOME", "value": "/tmp"}, *given]


def _capabilities(group: Group) -> Json:
    """Without SYS_NICE the runtime's seccomp profile forbids to bind memory to a NUMA node."""
    binds = group.role == "pool" and group.first.config.get("numa_node") is not None
    return {"drop": ["ALL"], **({"add": ["SYS_NICE"]} if binds else {})}


def _probes(cluster: Cluster, group: Group) -> Json:
    """Startup, readiness and liveness."""
    spec = group.first
    starts_s = spec.start_timeout_s or cluster.plan.settings.start_timeout_s
    port = "control" if group.role == "pool" else "http"
    is_open: Json = {"tcpSocket": {"port": port}}
    ready = alive = is_open
    if group.role != "pool" and not (spec.config.get("tls") or {}).get("client_ca"):
        ready = _get(group, "/ready" if group.role == "router" else "/pd/ready")
        if group.role == "router":
            alive = _get(group, "/health")
    return {
        "startupProbe": {
            **(alive if group.role == "router" else ready),
            "periodSeconds": PROBE_S,
            "timeoutSeconds": PROBE_S,
            "failureThreshold": math.ceil(starts_s / PROBE_S),
        },
        "readinessProbe": {
            **ready,
            "periodSeconds": PROBE_S,
            "timeoutSeconds": PROBE_S,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            **alive,
            "periodSeconds": 2 * PROBE_S,
            "timeoutSeconds": PROBE_S,
            "failureThreshold": 6,
        },
    }


def _get(group: Group, path: str) -> Json:
    config = group.first.config
    table, key = ("access", "tls_cert_file") if group.role == "router" else ("tls", "certificate")
    is_tls = bool((config.get(table) or {}).get(key))
    return {"httpGet": {"path": path, "port": "http", **({"scheme": "HTTPS"} if is_tls else {})}}


def _stop_hook(cluster: Cluster, group: Group, content: Content) -> list[str]:
    """What runs before SIGTERM; empty: nothing."""
    if group.role == "router":
        return ["sleep", str(ROUTER_NOTICE_S)]
    if group.role != "pool" or _is_last(cluster):
        return []
    words = ["pdserve", "pool", "drain", f"tcp:127.0.0.1:{CONTROL_PORT}", "--deadline", str(drain_s(group))]
    if content.admin_token:
        words += ["--token-file", content.admin_token]
    if ca := (content.tables.get("tls") or {}).get("ca"):
        words += ["--tls-ca", ca]
    return words


def _hook_s(cluster: Cluster, group: Group) -> float:
    if group.role == "router":
        return ROUTER_NOTICE_S
    return 0.0 if group.role != "pool" or _is_last(cluster) else drain_s(group)


def _is_last(cluster: Cluster) -> bool:
    """The only node of a pool has nobody who takes its pages."""
    return sum(len(group.specs) for group in cluster.of("pool")) < 2


def drain_s(group: Group) -> int:
    """Time for the others to take all pages of a node, at the rate that they pull with, and some more."""
    rate = parse_bytes(group.first.config.get("moving", {}).get("bytes_s", "500MB"))
    return 30 + (math.ceil(1.25 * capacity_bytes(group) / rate) if rate else 60)


def _resources(group: Group) -> Json:
    needs = group.first.needs
    asked: dict[str, str] = {}
    if needs.cpus:
        asked["cpu"] = f"{needs.cpus:g}"
    memory_bytes = needs.memory_bytes
    if group.role == "pool":
        memory_bytes = (memory_bytes or NODE_OVERHEAD_BYTES) + (0 if _huge(group) else capacity_bytes(group))
    if memory_bytes:
        asked["memory"] = _mebibytes(memory_bytes)
    made: Json = {"requests": asked} if asked else {}
    if group.role == "pool":  # pages in memory count for the pod's limit, so there is one
        made["limits"] = {"memory": asked["memory"]}
    if huge := _huge(group):
        size = {f"hugepages-{huge.removesuffix('B')}": _mebibytes(capacity_bytes(group))}
        made = {"requests": made["requests"] | size, "limits": made["limits"] | size}
    return made


def _huge(group: Group) -> str:
    """Size of a pool node's huge pages; empty: it has none."""
    found = group.first.config.get("huge_pages", "off") if group.role == "pool" else "off"
    return found if found in ("2MiB", "1GiB") else ""


def _mounts(group: Group, content: Content) -> list[Json]:
    made: list[Json] = [{"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}]
    if content.secrets:
        made.append({"name": "secrets", "mountPath": SECRETS_DIR, "readOnly": True})
    made.append({"name": "tmp", "mountPath": "/tmp"})
    if group.role != "router":
        made.append({"name": "shm", "mountPath": SHM_DIR})
    if group.role not in ("router", "pool"):
        made.append({"name": "models", "mountPath": MODELS_DIR, "readOnly": True})
    if _huge(group):
        made.append({"name": "hugepages", "mountPath": HUGE_DIR})
    return [*made, *({"name": name, "mountPath": path} for name, path, _ in tiers(group))]


def _volumes(group: Group, content: Content) -> list[Json]:
    """Tiers are no volumes of the pod: their claims make them."""
    made: list[Json] = [{"name": "config", "configMap": {"name": group.name}}]
    if content.secrets:
        items = [{"key": name, "path": name} for name, _ in content.secrets]
        made.append(
            {"name": "secrets", "secret": {"secretName": SECRET, "items": items, "defaultMode": 0o440}}
        )
    made.append({"name": "tmp", "emptyDir": {}})
    if group.role != "router":
        size = _mebibytes(capacity_bytes(group) * 21 // 20) if group.role == "pool" else WORKER_SHM
        made.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    if group.role not in ("router", "pool"):
        made.append({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}})
    if huge := _huge(group):
        made.append({"name": "hugepages", "emptyDir": {"medium": f"HugePages-{huge.removesuffix('B')}"}})
    return made


def _mebibytes(size_bytes: int) -> str:
    return f"{math.ceil(size_bytes / (1 << 20))}Mi"
