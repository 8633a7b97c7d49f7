"""Where Prometheus finds the metrics of a cluster's processes: the content of a file for its
`file_sd_configs`. Pure.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pdserve.up.plan import HttpReady, Plan, ProcessSpec

TARGETS_FILE: Final = "prometheus-targets.json"
"""In the run directory."""


def targets(plan: Plan) -> list[dict[str, object]]:
    """One entry for each process that has metrics; labels `job` (router, worker, pool, command) and
    `process`.
    """
    found: list[dict[str, object]] = []
    for spec in plan.processes:
        place = _place(spec)
        if place is not None:
            scheme, address = place
            job = spec.role if spec.role in ("pool", "router", "command") else "worker"
            labels = {"job": job, "process": spec.name}
            if scheme != "http":
                labels["__scheme__"] = scheme
            found.append({"targets": [address], "labels": labels})
    return found


def _place(spec: ProcessSpec) -> tuple[str, str] | None:
    """(scheme, host:port)"""
    if isinstance(spec.ready, HttpReady):
        parts = urlsplit(spec.ready.url)
        return parts.scheme, parts.netloc
    metrics = spec.config.get("metrics")
    if not isinstance(metrics, str) or not metrics:
        return None
    host, _, port = metrics.rpartition(":")
    return "http", f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"
