"""What the user is told once the cluster is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.up.config import ClusterFile
from pdserve.up.plan import make_plan
from pdserve.up.supervisor import announcement

QUESTION = '{"role": "user", "content": "What is the capital of France?"}'
BODY = f'{{"model": "m", "messages": [{QUESTION}], "max_tokens": 32}}'
KEY = "-H 'Authorization: Bearer YOUR_KEY' "


@pytest.mark.parametrize(
    ("router", "environment", "curl"),
    [
        ({}, {}, "curl http://127.0.0.1:8000"),
        ({"access": {"keys_file": "k"}}, {}, f"curl {KEY}http://127.0.0.1:8000"),
        ({}, {"PDSERVE_API_KEYS": "a=b"}, f"curl {KEY}http://127.0.0.1:8000"),
        ({"env": {"PDSERVE_API_KEYS": "a=b"}}, {}, f"curl {KEY}http://127.0.0.1:8000"),
        ({"access": {"tls_cert_file": "c"}}, {}, "curl -k https://127.0.0.1:8000"),
    ],
)
def test_the_curl_is_one_that_works(router: dict[str, Any], environment: dict[str, str], curl: str) -> None:
    file = ClusterFile(router={"port": 8000, "host": "0.0.0.0", **router}, agg=[{}])
    ports = iter(range(7000, 7010))
    plan = make_plan(file, program=("x",), run_dir=Path("/r"), uid=0, ports=ports, admin_key="secret")
    first, second, third = announcement(plan, "m", environment)
    assert first == f"cluster is ready at {plan.router_url} (Ctrl-C stops it). Try:"
    assert second == f"  {curl}/v1/chat/completions -H 'Content-Type: application/json' -d '{BODY}'"
    assert third == f"live page: {plan.live_page}, its password is [admin] key in /r/router.toml"
