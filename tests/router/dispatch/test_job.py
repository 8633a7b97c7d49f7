"""The plan's words on their way into a header."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.router.dispatch.job import header_words
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan
from tests.support.router.harness import disagg
from tests.support.router.mock_worker import ANSWER


def test_words_of_an_added_policy_cannot_end_a_headers_line() -> None:
    assert header_words(["decode=near(a\r\nset-cookie: b\0)", "prefill=é"]) == (
        b"decode=near(a??set-cookie: b?), prefill=?"
    )


async def test_a_policy_that_gives_odd_reasons_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Placer.plan

    def odd(self: Placer, *facts: object) -> Plan:
        made = plan(self, *facts)  # type: ignore[arg-type]
        return msgspec.structs.replace(made, reasons=(*made.reasons, "why=\r\nx: y"))

    monkeypatch.setattr(Placer, "plan", odd)
    async with disagg() as (harness, _, _):
        answer = await harness.chat()
        assert (answer.status, answer.body) == (200, ANSWER)
        assert "why=??x: y" in answer.headers["x-pdserve-plan"]
