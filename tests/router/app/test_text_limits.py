"""Bodies that cannot fit are refused before any worker sees them."""

from __future__ import annotations

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.worker import SMALLEST_BODY_BYTES
from tests.support.router.harness import CHAT, disagg
from tests.support.router.mock_worker import MockWorker


def knowing(role: str) -> MockWorker:
    return MockWorker(role, is_multimodal=False)


async def test_bodies_are_bounded_by_the_context_length_unless_the_configuration_says_otherwise() -> None:
    content = "x" * SMALLEST_BODY_BYTES
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with disagg(make=knowing) as (harness, _, [decode]):
        response = await harness.post(CHAT, body)
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert decode.requests == []
    async with disagg(make=knowing, limits=Limits(body_bytes=2 * SMALLEST_BODY_BYTES)) as (harness, _, _):
        assert (await harness.post(CHAT, body)).status == 200
    async with disagg() as (harness, _, _):  # workers that do not say
        assert (await harness.post(CHAT, body)).status == 200
