"""Pages of other origins: who may read answers, and who is asked before."""

from __future__ import annotations

import pytest

from pdserve.router.config.tenants import Access
from tests.support.router.harness import CHAT, Harness, disagg

APP, OTHER = "https://app.example.com", "https://evil.example.net"
KEY = "pd-" + "k" * 40
ALLOWED = "access-control-allow-origin"


async def preflight(
    harness: Harness, path: str, origin: str, wanted: str = "authorization"
) -> dict[str, str]:
    connection = await harness.connect()
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }
    await connection.send(path, b"", asked, method="OPTIONS")
    response = await connection.response()
    return {**response.headers, "status": str(response.status)}


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
async def test_a_page_of_an_allowed_origin_asks_first_and_then_reads_answers(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")
    async with disagg(access=Access(cors_origins=(APP,))) as (harness, _, _):
        said = await preflight(harness, path, APP)
        assert (said["status"], said[ALLOWED]) == ("200", APP)
        assert said["access-control-allow-headers"] == "authorization"
        headers = {"origin": APP, "authorization": f"Bearer {KEY}"}
        answer = await (harness.chat(headers) if path == CHAT else harness.get(path, headers))
        assert (answer.status, answer.headers[ALLOWED], answer.headers["vary"]) == (200, APP, "origin")
        refused = await (
            harness.chat({"origin": APP}) if path == CHAT else harness.get(path, {"origin": APP})
        )
        assert (refused.status, refused.headers[ALLOWED]) == (401, APP)  # the page learns why


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
async def test_other_origins_and_programs_are_told_nothing(path: str) -> None:
    async with disagg(access=Access(cors_origins=(APP,))) as (harness, _, _):
        said = await preflight(harness, path, OTHER)
        assert said["status"] == "405"
        assert ALLOWED not in said
        for headers in ({"origin": OTHER}, {}):
            answer = await (harness.chat(headers) if path == CHAT else harness.get(path, headers))
            assert (answer.status, ALLOWED in answer.headers) == (200, False)


async def test_a_router_that_names_no_origins_allows_none() -> None:
    async with disagg() as (harness, _, _):
        assert (await preflight(harness, CHAT, APP))["status"] == "405"
        assert ALLOWED not in (await harness.chat({"origin": APP})).headers


async def test_all_origins_may_be_let_in_and_headers_are_not_repeated_blindly() -> None:
    async with disagg(access=Access(cors_origins=("*",))) as (harness, _, _):
        assert (await preflight(harness, CHAT, OTHER))[ALLOWED] == "*"
        said = await preflight(harness, CHAT, OTHER, wanted="a:b")
        assert "access-control-allow-headers" not in said
