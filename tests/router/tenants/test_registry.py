"""Tenants, their keys and their rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.router.api.errors import ErrorForm, TooManyError
from pdserve.router.config.tenants import Access, Tenant, TenantLimits
from pdserve.router.tenants.api_keys import app, load_keys
from pdserve.router.tenants.tenant import Tenants, TenantState, TokenBucket, duration, rate_headers
from pdserve.security.tokens import digest


def state(**limits: float) -> TenantState:
    return TenantState("t", TenantLimits(**limits), 0.0)  # type: ignore[arg-type]


@given(
    rate=st.floats(0.01, 1000),
    capacity=st.floats(1, 1000),
    asks=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 2000)), max_size=50),
)
def test_a_bucket_never_lets_in_more_than_its_capacity_and_rate_and_then_when_it_says(
    rate: float, capacity: float, asks: list[tuple[float, float]]
) -> None:
    bucket, now_s, let_in = TokenBucket(rate, capacity, 0.0), 0.0, 0.0
    for pause_s, amount in asks:
        now_s += pause_s
        if wait_s := bucket.wait_s(amount, now_s):
            now_s += wait_s * (1 + 1e-6)
            assert bucket.wait_s(amount, now_s) == 0.0
        # one larger than the bucket goes into debt, which later ones wait for
        assert let_in <= capacity + rate * now_s + 1e-3
        bucket.charge(amount, now_s)
        let_in += amount
        assert bucket.level <= capacity


def refused(tenant: TenantState, tokens: int, now_s: float) -> tuple[str, int]:
    """What is said of a request, and after how many seconds it may come back."""
    with pytest.raises(TooManyError) as caught:
        tenant.take(tokens, now_s)
    assert caught.value.status == 429
    return str(caught.value).partition(" Try again")[0], caught.value.retry_after_s


def test_who_is_over_a_rate_is_told_when_to_come_back() -> None:
    tenant = state(requests_s=2.0)
    tenant.take(0, 0.0)
    tenant.take(0, 0.0)
    assert refused(tenant, 0, 0.0) == ("You may send 2 requests per second.", 1)
    tenant.take(0, 0.5)
    assert tenant.use.refused == 1


def test_tokens_are_charged_by_estimate_and_then_by_what_was_used() -> None:
    tenant = state(tokens_min=600)
    for _ in range(10):  # what came to nothing gives its tokens back
        tenant.take(600, 0.0)
        tenant.settle(600, 0, 0, 0.0)
    tenant.take(100, 0.0)
    tenant.settle(100, prompt_tokens=120, output_tokens=700, now_s=0.0)  # 220 more than there were
    assert refused(tenant, 80, 0.0) == ("You may use 600 tokens per minute.", 30)  # (220 + 80) / 10 a second
    tenant.take(80, 30.0)
    assert (tenant.use.prompt_tokens, tenant.use.output_tokens) == (120, 700)
    small = state(tokens_min=60)
    small.take(1000, 0.0)  # larger than a minute's worth: where the bucket is full
    refused(small, 1, 900.0)
    small.take(1, 1000.0)


def test_new_limits_keep_the_debt_and_the_use() -> None:
    tenants = Tenants()
    keys = {digest("k" * 20): "a"}
    tenants.configure(keys, [Tenant(name="a", tokens_min=60)], TenantLimits(), 0.0)
    [a] = tenants.all
    a.take(60, 0.0)
    a.settle(60, 660, 0, 0.0)
    tenants.configure(keys, [Tenant(name="a", tokens_min=6000)], TenantLimits(), 0.0)
    assert tenants.all == (a,)
    with pytest.raises(TooManyError):
        a.take(1, 5.0)  # 600 of debt at 100 per second
    a.take(1, 6.1)
    tenants.configure(keys, [], TenantLimits(), 6.1)
    a.take(10**6, 6.1)
    assert a.use.prompt_tokens == 660


def test_keys_find_their_tenant_and_nothing_else_does() -> None:
    tenants = Tenants()
    one, two = digest("one" * 8), digest("two" * 8)
    tenants.configure({one: "a", two: "b"}, [Tenant(name="b", weight=3.0)], TenantLimits(concurrency=2), 0.0)
    a, b = tenants.all
    assert tenants.find(one) is a
    assert tenants.find(two) is b
    assert (a.limits.concurrency, b.limits.weight) == (2, 3.0)
    assert tenants.find(one[:16] + two[16:]) is None
    assert tenants.find("") is None
    assert tenants.has_keys


@pytest.mark.parametrize(
    ("names", "said"), [(["a", "a"], "listed twice"), (["a", "ghost"], "tenant ghost .* has no API key")]
)
def test_a_configuration_that_fits_no_keys_changes_nothing(names: list[str], said: str) -> None:
    tenants = Tenants()
    keys = {digest("k" * 20): "a"}
    tenants.configure(keys, [], TenantLimits(), 0.0)
    before = tenants.all
    with pytest.raises(ConfigError, match=said):
        tenants.configure(keys, [Tenant(name=name, requests_s=1.0) for name in names], TenantLimits(), 0.0)
    assert tenants.all == before
    assert before[0].limits == TenantLimits()


# --- `pdserve key` and the keys file that it writes


def test_a_new_key_is_printed_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    runner = CliRunner()
    keys = [runner.invoke(app, ["acme", "--file", str(file)]).stdout.strip() for _ in range(2)]
    assert keys[0] != keys[1]
    assert all(len(key) > 40 for key in keys)
    assert not any(key in file.read_text() for key in keys)
    assert file.stat().st_mode & 0o077 == 0
    assert load_keys(Access(keys_file=file), {}) == {digest(key): "acme" for key in keys}


@pytest.mark.parametrize("tenant", ["shared", "a b", "a/b", "", "-x" * 40])
def test_what_cannot_name_a_tenant_gets_no_key(tenant: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--file", str(tmp_path / "keys"), "--", tenant])
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "keys").exists()


# --- What a client is told of its rates


UNIX_S = 1_795_000_000.0


def told(tenant: TenantState, now_s: float, form: ErrorForm = "openai") -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in rate_headers(tenant, form, now_s, UNIX_S)}


def test_what_was_used_is_missing_and_comes_back() -> None:
    assert told(state(), 0.0) == {}
    tenant = state(requests_s=2.0, tokens_min=6000)
    tenant.take(1000, 0.0)
    assert told(tenant, 0.0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5000",
        "x-ratelimit-reset-tokens": "10s",
    }
    later = told(tenant, 10.0)
    assert (later["x-ratelimit-remaining-tokens"], later["x-ratelimit-reset-tokens"]) == ("6000", "0ms")
    tenant = state(tokens_min=60)
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
def test_no_use_makes_a_header_that_is_no_number_and_a_debt_leaves_nothing(
    rate: float, spent: int, now_s: float
) -> None:
    tenant = state(requests_s=rate, tokens_min=1)
    tenant.settle(0, spent, 0, 0.0)
    headers = told(tenant, now_s, "anthropic")
    assert all(headers[f"x-ratelimit-remaining-{kind}"].isdigit() for kind in ("requests", "tokens"))
    assert int(headers["x-ratelimit-remaining-requests"]) <= int(headers["x-ratelimit-limit-requests"])
    if spent > 1 + now_s / 60:
        assert headers["x-ratelimit-remaining-tokens"] == "0"
