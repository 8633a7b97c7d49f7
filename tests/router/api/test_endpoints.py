"""An endpoint is one row: everything that the router does for it follows from that row."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.router.api.endpoints import ENDPOINTS, Endpoint, usage_under
from pdserve.router.api.request_body import RequestView
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Tenant
from tests.support.router.harness import disagg
from tests.support.router.mock_worker import answer

PATH = "/v1/answers"
ROW = Endpoint(
    path=PATH,
    summary="Answers",
    task="generate",
    prompt_fields=("input",),
    sampling_field="sampling",
    usage=usage_under("input_tokens", "output_tokens"),
    streams=True,
    salt="body",
    is_resumable=True,
    is_prefillable=True,
)
KEY = "pd-" + "k" * 40
HEADERS = {"authorization": f"Bearer {KEY}", "x-session-id": "s"}


@pytest.fixture
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENDPOINTS, PATH, ROW)
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={KEY}")


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "input": "word " * 100, "sampling": {"temperature": 0}} | more


@pytest.mark.usefixtures("_added")
async def test_a_new_row_is_planned_salted_prefilled_counted_and_documented() -> None:
    usage = {"usage": {"input_tokens": 101, "output_tokens": 7}}
    tenants = (Tenant(name="acme", tokens_min=1_000_000),)
    async with disagg(prefill_endpoints=(PATH,), tenants=tenants) as (harness, (prefill,), (decode,)):
        decode.script(PATH, answer(200, usage))
        assert (await harness.post(PATH, body(), HEADERS)).json() == usage
        (staged,), (asked,) = prefill.got("/pd/prefill"), decode.got(PATH)
        assert staged.target == f"/pd/prefill?endpoint={PATH}"
        assert asked.json()["cache_salt"] == staged.json()["cache_salt"] == "tenant/acme"
        assert asked.headers["x-pdserve-marks"] == "1"
        used = harness.router.gate.tenants.all[0].use
        assert (used.prompt_tokens, used.output_tokens) == (101, 7)
        document = (await harness.get("/openapi.json")).json()
        assert "text/event-stream" in document["paths"][PATH]["post"]["responses"]["200"]["content"]
        assert (await harness.post(PATH, body())).status == 401


def test_rows_agree_with_the_request_that_is_read_and_with_the_configuration() -> None:
    for path, row in ENDPOINTS.items():
        assert path == row.path
        assert bool(row.prompt_fields) == (row.task is not None)
        assert set(row.prompt_fields) <= set(RequestView.__struct_fields__)
        assert not row.is_resumable or row.streams
        config = msgspec.json.encode({"agg": ["http://a:1"], "prefill_endpoints": [path]})
        if row.is_prefillable:
            assert msgspec.json.decode(config, type=RouterConfig).prefill_endpoints == (path,)
        else:
            with pytest.raises(msgspec.ValidationError, match="Invalid enum value"):
                msgspec.json.decode(config, type=RouterConfig)
