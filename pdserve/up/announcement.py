"""What others are told of a cluster that is ready: its user the URL, a request to try and the live page, and
Prometheus where the metrics are (`file_sd_configs`). Pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from pdserve.up.spec import HttpReady, Plan, ProcessSpec

TARGETS_FILE: Final = "prometheus-targets.json"
"""In the run directory."""
API_KEYS: Final = "PDSERVE_API_KEYS"
"""In the router's environment: API keys that clients must show."""


def announcement(plan: Plan, model: str, environment: Mapping[str, str]) -> list[str]:
    """Lines for the console. `environment` is the supervisor's, which the router inherits."""
    url = plan.router_url
    router = plan.routers[0] if plan.routers else None
    access = router.config.get("access", {}) if router else {}
    keys = access.get("keys_file") or {**environment, **(router.env if router else {})}.get(API_KEYS)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [question], "max_tokens": 32}
    words = [
        "curl",
        *(["-k"] if url.startswith("https:") else []),  # the certificate names another host
        *(["-H", "'Authorization: Bearer YOUR_KEY'"] if keys else []),
        f"{url}/v1/chat/completions",
        *("-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(body))),
    ]
    lines = [f"{plan.settings.name} is ready at {url} (Ctrl-C stops it). Try:", f"  {' '.join(words)}"]
    if router is not None and plan.live_page:
        lines.append(f"live page: {plan.live_page}, its password is [admin] key in {router.config_path}")
    return lines


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
