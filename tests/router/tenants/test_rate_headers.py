"""What a client is told of its rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.errors import ErrorForm
from pdserve.router.config.tenants import TenantLimits
from pdserve.router.tenants.tenant import TenantState, duration, rate_headers

UNIX_S = 1_795_000_000.0


def told(tenant: TenantState, now_s: float, form: ErrorForm = "openai") -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in rate_headers(tenant, form, now_s, UNIX_S)}


def test_a_tenant_without_rates_is_told_none() -> None:
    assert told(TenantState("a", TenantLimits(concurrency=3), 0.0), 1.0) == {}


def test_what_was_used_is_missing_and_comes_back() -> None:
    tenant = TenantState("a", TenantLimits(requests_s=2.0, tokens_min=6000), 0.0)
    tenant.take(1000, 0.0)
    assert told(tenant, 0.0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5000",
        "x-ratelimit-reset-tokens": "10s",
    }
    assert told(tenant, 10.0)["x-ratelimit-remaining-tokens"] == "6000"
    assert told(tenant, 10.0)["x-ratelimit-reset-tokens"] == "0ms"


def test_a_debt_leaves_nothing_and_takes_longer() -> None:
    tenant = TenantState("a", TenantLimits(tokens_min=60), 0.0)
    tenant.settle(0, 200, 0, 0.0)
    assert told(tenant, 0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert told(tenant, 0.0)["x-ratelimit-reset-tokens"] == "3m20s"


def test_anthropics_clients_are_told_a_time() -> None:
    tenant = TenantState("a", TenantLimits(tokens_min=60), 0.0)
    tenant.take(30, 0.0)
    headers = told(tenant, 0.0, "anthropic")
    assert headers["anthropic-ratelimit-tokens-limit"] == "60"
    assert headers["anthropic-ratelimit-tokens-remaining"] == "30"
    assert headers["anthropic-ratelimit-tokens-reset"] == "2026-11-18T11:07:10Z"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0501, "51ms"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"), (3723, "1h2m3s")],
)
def test_lengths_of_time_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0.01, 1e6), st.integers(0, 10**12), st.floats(0, 1e6))
def test_no_use_makes_a_header_that_is_no_number(rate: float, spent: int, now_s: float) -> None:
    tenant = TenantState("a", TenantLimits(requests_s=rate, tokens_min=1), 0.0)
    tenant.settle(0, spent, 0, 0.0)
    headers = told(tenant, now_s, "anthropic")
    assert all(headers[f"x-ratelimit-remaining-{kind}"].isdigit() for kind in ("requests", "tokens"))
    assert int(headers["x-ratelimit-remaining-requests"]) <= int(headers["x-ratelimit-limit-requests"])
    assert rate_headers(tenant, "openai", now_s, UNIX_S) == rate_headers(tenant, "openai", now_s, UNIX_S)
