"""What the user is told once the cluster is ready: its URL, a request to try, the live page. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Final

from pdserve.up.plan import Plan

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
