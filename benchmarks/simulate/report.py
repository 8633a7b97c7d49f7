"""Simulated outcomes as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.simulate.advise import Advice
from benchmarks.simulate.load import BLOCK_TOKENS, Request
from benchmarks.simulate.outcome import Outcome
from benchmarks.simulate.size import Setting
from benchmarks.tables import table

if TYPE_CHECKING:
    from benchmarks.simulate.real import Row

COLUMNS = (
    "workers",
    "in time",
    "more",
    "goodput/s",
    "ttft p50",
    "p90",
    "itl p50",
    "p90",
    "cached",
    "prefill busy",
)


def summary(load: Sequence[Request], setting: Setting) -> str:
    """The load in a line."""
    seconds = max(1e-3, load[-1].at_s - load[0].at_s)
    prompts, answers = (sum(getattr(one, f"{what}_tokens") for one in load) for what in ("prompt", "output"))
    rates = setting.rates
    return (
        f"{len(load):,} requests in {seconds:,.0f} s: {len(load) / seconds:.2f} requests/s, prompts of "
        f"{prompts / len(load):,.0f} tokens and answers of {answers / len(load):,.0f} on average. "
        f"A worker computes {1e3 / rates.prefill_ms_per_token:,.0f} prompt tokens/s, and has a step of "
        f"{rates.step_ms:g} ms and {rates.step_ms_per_request:g} ms for each request."
    )


def advised(advice: Advice, goal: float) -> Table:
    """The steps around the smallest number of workers."""
    found = str(advice.chosen.size)
    caption = (
        f"{found}: the least with {goal:.0%} in time"
        if advice.reached
        else f"{goal:.0%} in time is not reached; best: {found} with {advice.chosen.in_time:.1%}"
    )
    return table(advice.kind, COLUMNS, _rows(advice.steps), left=("workers",), caption=caption)


def compared(outcomes: Sequence[Outcome]) -> Table:
    """The same number of workers in different roles."""
    columns = (
        "workers",
        "in time",
        *(f"part {number}" for number in range(1, 5)),
        "goodput/s",
        "late",
        "slow",
        "computed twice",
        "changes",
    )
    rows = [
        (
            str(one.size),
            f"{one.in_time:.1%}",
            *(f"{part:.0%}" for part in (*one.in_time_by_part, 0, 0, 0, 0)[:4]),
            f"{one.goodput_s:.2f}",
            f"{one.late:.1%}",
            f"{one.slow:.1%}",
            f"{one.computed_twice:.1%}",
            str(one.duty_changes),
        )
        for one in outcomes
    ]
    return table(
        f"{outcomes[0].size.total} workers",
        columns,
        rows,
        left=("workers",),
        caption="parts: quarters of the load",
    )


def tried(found: Sequence[Row]) -> Table:
    """Real workers of each kind beside the simulated ones: shares in time, by quarters of the load."""
    columns = (
        "workers",
        "rounds",
        "in time",
        "by quarter",
        "simulated",
        "by quarter",
        "late",
        "slow",
        "changes",
    )
    shown = [
        (
            one.kind,
            str(one.rounds),
            f"{one.in_time:.0%}",
            _parts(one.in_time_by_part),
            f"{one.simulated:.0%}",
            _parts(one.simulated_by_part),
            f"{one.late:.0%}",
            f"{one.slow:.0%}",
            f"{one.duty_changes:g}",
        )
        for one in found
    ]
    return table("two workers", columns, shown, left=("workers",))


def _parts(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def pools(found: Iterable[tuple[int, Outcome]], kv_bytes_per_token: int) -> Table:
    """The same workers with more and more pool."""
    rows = []
    for blocks, one in found:
        tokens = blocks * BLOCK_TOKENS
        size = f"{tokens * kv_bytes_per_token / 2**30:,.1f}" if kv_bytes_per_token else "-"
        shares = (f"{share:.1%}" for share in (one.in_time, one.cached, one.computed_twice))
        rows.append((f"{tokens:,}", size, *shares, f"{one.goodput_s:.2f}"))
    columns = ("tokens", "GiB", "in time", "cached", "computed twice", "goodput/s")
    return table("pool", columns, rows, caption="computed twice: though another worker had it")


def _rows(steps: Sequence[Outcome]) -> Iterable[Sequence[str]]:
    before: Outcome | None = None
    for one in steps:
        more = "" if before is None else f"{100 * (one.in_time - before.in_time):+.1f}"
        busy = ", ".join(f"{share:.0%}" for role, share in one.busy.items() if role != "decode")
        yield (
            str(one.size),
            f"{one.in_time:.1%}",
            more,
            f"{one.goodput_s:.2f}",
            *(f"{one.ttft_ms.get(p, 0.0):,.0f}" for p in ("p50", "p90")),
            *(f"{one.itl_ms.get(p, 0.0):.1f}" for p in ("p50", "p90")),
            f"{one.cached:.0%}",
            busy,
        )
        before = one
