"""Why a prompt's pages were computed here: counted by reason, and told in the prefill's report.

Of each prompt the first full page that no cache had is asked about. It decides for all behind it, since a
page is of no use without those before it. The node that owns the page now is asked, once the prompt is
computed.

| reason | the page |
|---|---|
| never_stored | was never in this node's memory, or the node has forgotten it: long ago, cleared, restarted |
| evicted | was removed to make room |
| over_quota | was removed because its namespace had too much |
| expired | had lived as long as its namespace allows |
| dropped | was corrupt, or moved to another node |
| not_fetched | was in the pool before the prompt: too short a prompt, no host memory, or too slow a way |
| unknown | the node could not be asked, or removed the page only after the prompt came |
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import RequestPages
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.protocol.messages import MAX_FATES, Fate

REASONS: Final = {
    "capacity": "evicted",
    "slab": "evicted",
    "quota": "over_quota",
    "ttl": "expired",
    "dropped": "dropped",
}
"""By the node's word for the removal."""


class Miss(NamedTuple):
    """`tokens`: of the full pages that were computed. `age_s`: since the page was removed, or stored."""

    reason: str
    tokens: int
    age_s: float | None


def miss_of(fate: Fate | None, tokens: int, asked_ago_s: float) -> Miss:
    """The reason of one miss. `asked_ago_s`: since the prompt came."""
    if fate is None:
        return Miss("unknown", tokens, None)
    if fate.stored_ago_s is not None and fate.stored_ago_s > asked_ago_s:
        return Miss("not_fetched", tokens, fate.stored_ago_s)
    if fate.removed_ago_s is None:
        return Miss("never_stored", tokens, None)
    if fate.removed_ago_s <= asked_ago_s:
        return Miss("unknown", tokens, None)
    return Miss(REASONS.get(fate.reason, "unknown"), tokens, fate.removed_ago_s)


def header_of(misses: list[Miss]) -> str:
    """`REASON=TOKENS;age_s=A, ...`, the most tokens first. The age is that of the youngest removal."""
    tokens: Counter[str] = Counter()
    ages: dict[str, float] = {}
    for miss in misses:
        tokens[miss.reason] += miss.tokens
        if miss.age_s is not None:
            ages[miss.reason] = min(miss.age_s, ages.get(miss.reason, miss.age_s))
    return ", ".join(
        f"{reason}={count}" + (f";age_s={ages[reason]:.1f}" if reason in ages else "")
        for reason, count in tokens.most_common()
    )


class MissedPages:
    """Asks the pool, and counts. Lives in the worker's event loop."""

    def __init__(self, pool: AsyncPoolClient, metrics: WorkerMetrics) -> None:
        self._pool = pool
        self._metrics = metrics

    async def why(
        self,
        pages: RequestPages,
        prompt_tokens: Mapping[str, int],
        cached_tokens: Mapping[str, int],
        asked_s: float,
    ) -> list[Miss]:
        """The misses of a request's first MAX_FATES prompts. `asked_s`: when it came, by `monotonic`."""
        missed = pages.missed(prompt_tokens, cached_tokens)[:MAX_FATES]
        if not missed:
            return []
        fates = await self._pool.fates([key for key, _ in missed], pages.tenant)
        asked_ago_s = time.monotonic() - asked_s
        misses = [miss_of(fate, tokens, asked_ago_s) for fate, (_, tokens) in zip(fates, missed, strict=True)]
        for miss in misses:
            self._metrics.miss(miss.reason, miss.tokens)
        return misses

    async def count(self, request: HttpRequest, pages: RequestPages) -> None:
        """Count those of a request that was answered here. `pages`: of its prompts, with their outputs."""
        own = request.reuse.own()
        prompts = {rid: tokens for rid, (_, tokens) in own.items()}
        cached = {rid: tokens for rid, (tokens, _) in own.items()}
        await self.why(pages, prompts, cached, request.started_s)
