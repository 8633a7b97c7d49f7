"""Groups of prompts that begin alike, over eight workers: a router that knows who has which prefix, without a
pool, against one that does not care, with a pool. By the simulation of the router's own decisions; nothing is
started, and no time is measured.

The shape is that of llm-d's tables: eight replicas of a 7B model on one A10G each, and long prefixes that
many prompts share, together more than any worker keeps. Rates are guesses for such a card, the same for all.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec.structs import asdict, replace

from benchmarks.lib.report import FormatOption, Output, Seed, Table, ms, script, times
from benchmarks.simulate.model import BLOCK_TOKENS, Rates, Setting, Size, groups
from benchmarks.simulate.simulate import Outcome, simulate
from pdserve.router.config.limits import ServiceLevel

WORKERS: Final = 8
RATES: Final = Rates(
    prefill_ms_per_token=0.3,
    step_ms=25.0,
    step_ms_per_request=0.5,
    pool_ms_per_token=0.02,  # 57 KB a token: 2.9 GB/s, a quarter of 100 Gbit/s
    hop_ms=5.0,
)
WAYS: Final[dict[str, tuple[str, bool]]] = {
    "round-robin, no pool": ("round_robin", False),
    "affinity, no pool": ("cache_aware", False),
    "round-robin, pool": ("round_robin", True),
    "affinity, pool": ("cache_aware", True),
}
"""Policy of the placement, and whether there is a pool. Ratios are over the first."""


def main(
    rate: Annotated[str, typer.Option(help="Requests a second, separated by commas.")] = "2,4,6",
    requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = 4000,
    prefixes: Annotated[int, typer.Option(min=1, help="Groups.")] = 150,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="That a group's prompts share.")] = 6144,
    worker_tokens: Annotated[int, typer.Option(min=0, help="Tokens that a worker keeps itself.")] = 100_000,
    seed: Seed = 1,
    format: FormatOption = "text",
) -> None:
    setting = Setting(
        rates=RATES,
        level=ServiceLevel(ttft_ms=2000.0),
        max_running=64,
        worker_blocks=worker_tokens // BLOCK_TOKENS,
        seed=seed,
    )
    title = f"{prefixes} prefixes of {prefix_tokens:,} tokens over {WORKERS} workers"
    output = Output(format, load=title, rates=asdict(RATES), worker_tokens=worker_tokens)
    rows = []
    for each in rate.split(","):
        load = groups(seed, requests, float(each), prefixes, prefix_tokens)
        base: Outcome | None = None
        for way, (policy, pool) in WAYS.items():
            own = replace(setting, policy=policy, pool_blocks=None if pool else 0)
            found = simulate(load, Size(agg=WORKERS), own)
            base = base or found
            output.row(found, way=way, rate_s=float(each))
            first, over = found.ttft_ms, found.ttft_ms["p50"] / base.ttft_ms["p50"]
            shares = f"{found.cached:.0%}", f"{found.busy['agg']:.0%}"
            rows.append((each, way, ms(first["p50"]), times(over), ms(first["p99"]), *shares))
    columns = ("requests/s", "way", "first token p50, ms", "over", "p99", "cached", "computing")
    output.show(Table(title, columns, rows, left=("way",)))


if __name__ == "__main__":
    script(main, __doc__)
