"""`GET /decisions`: why a request went where, for administrators."""

from __future__ import annotations

import json
from typing import Any

import httpx

from pdserve.router.admin.app import AdminApp
from pdserve.router.admin.other_routers import OtherRouters
from pdserve.router.config.router import Admin
from tests.support.router.harness import CHAT, Harness, before, disagg
from tests.support.router.mock_worker import MockWorker, answer

KEY = "administrators-key-of-this-test"
ADMIN = Admin(key=KEY, port=0, decisions=4)


async def asked(harness: Harness, **query: Any) -> httpx.Response:
    app = AdminApp(harness.router, OtherRouters(harness.router.config))
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
        return await client.get("/decisions", params=query)


async def decisions(harness: Harness, **query: Any) -> list[dict[str, Any]]:
    response = await asked(harness, **query)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["decisions"]
    return found


async def test_a_request_is_found_by_its_id_with_what_decided_and_who_answered() -> None:
    async with disagg(admin=ADMIN) as (harness, [prefill], [decode]):
        said = await harness.chat({"x-request-id": "mine", "x-session-id": "s", "x-pdserve-priority": "3"})
        await harness.chat({"x-request-id": "other"})
        await harness.settle()
        [one] = await decisions(harness, request_id="mine")
        assert (one["route"], one["status"], one["model"], one["urgency"]) == (CHAT, 200, "m", 3)
        assert one["plan"] == said.headers["x-pdserve-plan"]
        assert one["workers"]["x-pdserve-prefill"] == prefill.id
        assert one["workers"]["x-pdserve-decode"] == decode.id
        assert one["ended_by"] == ""
        assert 0 <= one["first_byte_s"] <= one["seconds"]  # the clock counts whole milliseconds
        assert await decisions(harness, request_id="nobody's") == []


async def test_the_newest_are_kept_and_told_first_those_that_failed_too() -> None:
    worker = MockWorker("decode")
    async with before(worker, admin=ADMIN) as harness:
        worker.script(CHAT, answer(400, {"error": {"message": "no"}}))
        for number in range(5):
            await harness.chat({"x-request-id": f"r{number}"}, model="m" if number < 4 else "unknown")
        await harness.settle()
        found = await decisions(harness)
        assert [(one["request_id"], one["status"]) for one in found] == [
            ("r4", 404),
            ("r3", 200),
            ("r2", 200),
            ("r1", 200),
        ]
        assert [one["request_id"] for one in await decisions(harness, limit=1)] == ["r4"]
        assert found[0]["phase"] == "plan"


async def test_no_prompt_answer_or_key_is_kept() -> None:
    async with disagg(admin=ADMIN) as (harness, _, _):
        headers = {"authorization": "Bearer a-secret-key", "x-session-id": "a-secret-session"}
        await harness.chat(headers, user="a-secret-user", messages=[{"role": "user", "content": "a-secret"}])
        await harness.settle()
        assert "secret" not in json.dumps(await decisions(harness))


async def test_without_an_admin_api_nothing_is_kept() -> None:
    async with disagg(admin=Admin(key=KEY)) as (harness, _, _):
        await harness.chat()
        await harness.settle()
        assert await decisions(harness) == []


async def test_a_query_that_is_not_valid_is_refused_by_its_name_and_tells_nothing_of_the_server() -> None:
    async with disagg(admin=ADMIN) as (harness, _, _):
        refused = await asked(harness, limit="x")
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400
        assert message.startswith("limit: ")
        assert all(word not in message for word in ("File", ".py", "line", "{"))
