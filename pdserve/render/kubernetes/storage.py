"""Disks of a host for the tiers of pool nodes: a class of volumes that exist already, and claims of it. Pure.

A tier on the host's own NVMe is lost with the host, as its memory is. Such volumes are made by an
administrator, or by the local static provisioner. A pod that has one stays on its host.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pdserve.render.kubernetes.containers import tiers
from pdserve.render.kubernetes.groups import Cluster

Json = dict[str, Any]

CLASS: Final = "pdserve-local-nvme"


def storage_class() -> Json:
    """A claim waits for its pod, so that the volume is one of the host where the pod fits."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def claim_patches(cluster: Cluster) -> list[Json]:
    """For Kustomize: every claim of a tier asks for this class."""
    made = []
    for group in cluster.of("pool"):
        steps = [
            {"op": "add", "path": f"/spec/volumeClaimTemplates/{i}/spec/storageClassName", "value": CLASS}
            for i in range(len(tiers(group)))
        ]
        if steps:
            made.append({"target": {"kind": "StatefulSet", "name": group.name}, "patch": json.dumps(steps)})
    return made
