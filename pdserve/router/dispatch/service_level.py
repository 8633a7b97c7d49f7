"""What becomes of requests that cannot get their service level, by the tenant's `on_slo_miss`.

| expected of the plan | mark | queue | refuse |
|---|---|---|---|
| met: within the level | served | served | served |
| late: others make it late | served, marked | waits, then 429 after `admission.queue_s` | 429 |
| long: its prompt alone takes too long | served, marked | served, marked | served, marked |

A prompt that is too long for the level would be refused for ever, and waiting would not help it. Those that
wait are let go one after the other, so that each one's forecast counts the load of those before it. A waiting
request holds its place among the running ones (`admission`), which bounds how many wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from pdserve.router.api.errors import TooManyError
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.slo import ServiceLevel
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.elastic.forecast import Forecast, Verdict, forecast
from pdserve.router.placement.planner import Plan
from pdserve.router.request.call import Call

TICK_S: Final = 0.05
"""A waiting request looks again after this long."""
SLO_HEADER: Final = b"x-pdserve-slo"
OnMiss = Literal["mark", "queue", "refuse"]


def act_on(verdict: Verdict, on_miss: OnMiss) -> Literal["met", "mark", "queue", "refuse"]:
    """What becomes of a request: see the table of the module."""
    if verdict == "met":
        return "met"
    return on_miss if verdict == "late" else "mark"


class ServiceLevels:
    """Lets planned requests go on, wait, or not. Make it inside the running loop."""

    def __init__(self, config: RouterConfig, stats: Stats) -> None:
        self._level: ServiceLevel = config.slo
        self._weights = config.placement
        self._queue_s = config.admission.queue_s
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._next = asyncio.Lock()
        """Held by the request that is let go next. Waiting requests get it in the order they came."""

    async def admit(self, call: Call, plan: Plan, plan_again: Callable[[], Plan]) -> Plan:
        """The plan to carry out. `plan_again` plans by the load at its call. Raises TooManyError,
        NoWorkerError.
        """
        if not call.facts.prompt_tokens_estimate or call.facts.holder:
            return plan
        expected = self._forecast(call, plan)
        verdict = expected.verdict(self._level)
        act = act_on(verdict, call.tenant.limits.on_slo_miss)
        self._stats.slo[call.tenant.name, act] += 1
        if act == "refuse":
            raise self._refusal(expected)
        if act == "queue":
            plan, verdict = await self._wait(call, expected, plan_again)
        if verdict == "met":
            return plan
        call.answer.more_headers = [*call.answer.more_headers, (SLO_HEADER, verdict.encode("ascii"))]
        words = f"slo={verdict}({expected.ttft_ms:.0f}ms {expected.itl_ms:.1f}ms)"
        return msgspec.structs.replace(plan, reasons=(*plan.reasons, words))

    async def _wait(
        self, call: Call, expected: Forecast, plan_again: Callable[[], Plan]
    ) -> tuple[Plan, Verdict]:
        """The plan once the request is not late any more, and what is expected then."""
        begun_s, call.phase = self._loop.time(), "queue"
        try:
            async with asyncio.timeout(self._queue_s), self._next:
                while True:
                    plan = plan_again()
                    expected = self._forecast(call, plan)
                    verdict = expected.verdict(self._level)
                    if verdict != "late":
                        return plan, verdict
                    await asyncio.sleep(TICK_S)
        except TimeoutError:
            self._stats.slo[call.tenant.name, "refuse"] += 1
            raise self._refusal(expected) from None
        finally:
            waited_s = self._loop.time() - begun_s
            call.parts_s["queue"] = call.parts_s.get("queue", 0.0) + waited_s

    def _forecast(self, call: Call, plan: Plan) -> Forecast:
        prompt_tokens = call.facts.prompt_tokens_estimate
        return forecast(self._weights, self._level, prompt_tokens, plan.places, plan.decode, plan.prefill)

    def _refusal(self, expected: Forecast) -> TooManyError:
        wait_s = max(0.0, expected.ttft_ms - self._level.ttft_ms) / 1e3 if self._level.ttft_ms else 0.0
        return TooManyError("The service level cannot be kept now.", wait_s, "service_level")
