"""How many wrong keys one address may try at a router, on each of its ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.router.config.tenants import Access
from pdserve.router.tenants.api_keys import key_line
from pdserve.security.failed_logins import BURST
from tests.support.router.harness import Harness, Response, disagg
from tests.support.router.mock_worker import ANSWER

ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
LOOPBACK = "127.0.0.1"


FORGIVEN_S = 1e-3


@pytest.fixture(autouse=True)
def forgives_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nothing is forgiven within a test."""
    monkeypatch.setattr("pdserve.security.failed_logins.FORGIVEN_S", FORGIVEN_S)


def access(tmp_path: Path, *proxies: str) -> Access:
    file = tmp_path / "keys"
    file.write_text(key_line("alice", ALICE) + key_line("bob", BOB))
    return Access(keys_file=file, proxies=proxies)


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def guess(harness: Harness, times: int, path: str = "") -> list[Response]:
    """`path`: empty for a chat."""
    keys = [by(f"a key that is wrong {number}") for number in range(times)]
    return [await (harness.get(path, key) if path else harness.chat(key)) for key in keys]


@pytest.mark.parametrize("path", ["", "/v1/models", "/metrics", "/v1/responses/resp_1"])
async def test_an_address_tries_so_many_keys_and_then_waits_whatever_route_it_asks(
    tmp_path: Path, path: str
) -> None:
    async with disagg(access=access(tmp_path)) as (harness, _, [decode]):
        answers = await guess(harness, BURST + 8, path)
        assert {answer.status for answer in answers[:BURST]} == {401}
        assert {answer.status for answer in answers[BURST:]} == {429}
        last = answers[-1]
        assert (last.error["type"], last.error["code"]) == ("rate_limit_error", "too_many_wrong_keys")
        assert 0 < int(last.headers["retry-after"]) <= 1 / FORGIVEN_S
        assert "www-authenticate" not in last.headers
        assert decode.requests == []
        counted = harness.router.own_metrics()
        assert (counted.value("unknown_keys"), counted.value("unread_keys")) == (BURST, 8)


async def test_a_right_key_that_was_used_from_there_before_is_not_locked_out(tmp_path: Path) -> None:
    async with disagg(access=access(tmp_path)) as (harness, _, _):
        assert (await harness.chat(by(ALICE))).status == 200
        await guess(harness, BURST + 8)
        assert (await harness.chat(by(ALICE))).body == ANSWER
        assert (await harness.get("/v1/models", by(ALICE))).status == 200
        new = await harness.chat(by(BOB))
        assert new.status == 429, "else the answer would tell a guess from a hit"


async def test_no_key_at_all_is_no_guess(tmp_path: Path) -> None:
    async with disagg(access=access(tmp_path)) as (harness, _, _):
        for _ in range(BURST + 8):
            assert (await harness.get("/v1/models")).status == 401
        assert (await harness.chat(by(BOB))).status == 200


async def test_what_comes_by_a_proxy_is_not_bound_here(tmp_path: Path) -> None:
    async with disagg(access=access(tmp_path, LOOPBACK)) as (harness, _, _):
        assert {answer.status for answer in await guess(harness, BURST + 8)} == {401}
        assert (await harness.chat(by(BOB))).status == 200


async def test_the_refusal_of_a_body_has_the_form_of_its_api(tmp_path: Path) -> None:
    async with disagg(access=access(tmp_path)) as (harness, _, _):
        await guess(harness, BURST)
        refused = await harness.post("/v1/messages", b"{}", {"x-api-key": BOB})
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 0
