"""The same conversations on several servers, which take turns: plain SGLang, SGLang with file storage or
Mooncake, and pdserve. Contenders are cluster files in benchmarks/contenders, others by their path, or the
URL of a server of OpenAI's API that runs already (its key: OPENAI_API_KEY).

All are started on this machine, one after the other. In each round every load goes to each of them, and every
round begins with another. Rounds have texts of their own, so their first turns find nothing cached. A
contender that is not being asked takes about 2 % of a core meanwhile. The script fails if a server could not
be measured or a request failed; it shows the other results nevertheless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from msgspec.structs import replace

from benchmarks.lib.cluster import (
    DEMO_MODEL,
    Contender,
    ExtraArgs,
    ModelOption,
    PoolCapacityOption,
    launched,
    settings_of,
)
from benchmarks.lib.figures import Measured, Summary, Turn, by_turn, outcome_of, remarks, summaries
from benchmarks.lib.load import PRESETS, Load, Shape, make_load, shapes_of, total_tokens
from benchmarks.lib.picture import draw_turns
from benchmarks.lib.report import (
    FormatOption,
    OutOption,
    Output,
    Seed,
    Silence,
    Table,
    choices,
    fail_with,
    ms,
    say,
    script,
    times,
)
from benchmarks.lib.run import Say, Server, run_load
from pdserve.errors import ConfigError
from tests.support.mooncake import is_installed
from tests.support.processes import HarnessError

PAGE_SIZE: Final = 64
Size = Literal["small", "large"]
SHARES: Final[dict[Size, float]] = {"small": 0.3, "large": 1.1}
"""The device's KV cache over what all sessions have at their end: they do not fit, they do."""
WARM_UP_SEED: Final = 1 << 40
SEEDS_OF_A_LOAD: Final = 1 << 32  # loads have texts of their own, as rounds have

Launch = Callable[[str, Size], AbstractContextManager[Contender]]
"""(contender, size of the device's cache) to its cluster."""
LoadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--load", help=f"PRESET,scale=S,users=N,rounds=N, ...; several run in turn. {', '.join(PRESETS)}."
    ),
]


def main(
    against: Annotated[
        str,
        typer.Option(
            help="Contenders, separated by commas; ratios are over the first. Empty: plain, file, mooncake "
            "if it is installed, agg, disagg."
        ),
    ] = "",
    sizes: Annotated[
        str, typer.Option(help="Device KV caches: small (sessions do not fit), large (they fit).")
    ] = "small,large",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; results are medians over them.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="No round that would end later is begun; 0: no limit.")
    ] = 0.0,
    load: LoadOption = None,
    seed: Seed = 1,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Closed loop: requests at a time; 0: each user's.")
    ] = 2,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Open loop: requests per second.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="All processes of each contender before the last turn.")
    ] = False,
    model: ModelOption = DEMO_MODEL,
    pool_capacity: PoolCapacityOption = "2GiB",
    silence: Silence = 300.0,
    out: OutOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw first token and cached share by turn: NAME.svg or .png.")
    ] = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    usual = ["plain", "file", *(["mooncake"] if is_installed() else []), "agg", "disagg"]
    contenders, chosen = against.split(",") if against else usual, choices("sizes", sizes, tuple(SHARES))
    loads = shapes_of(load or ["eic,scale=0.1"])
    if restart and rate:
        raise ConfigError("--restart is for the closed loop: leave out --rate")
    tokens = {size: cache_tokens(list(loads.values()), SHARES[size], concurrency) for size in chosen}
    output = Output(
        format, load="; ".join(loads), model=model.name, seed=seed, against=contenders, device_tokens=tokens
    )
    measured: list[Measured] = []

    def keep(one: Measured) -> None:
        measured.append(one)
        output.row(one)
        for line in remarks(one.outcome):
            say(f"{one.contender}, {one.size}: {line}")

    with settings_of(
        model, min(tokens.values()), extra, out, page_size=PAGE_SIZE, pool_capacity=pool_capacity
    ) as settings:
        problems = compare(
            *(contenders, chosen, repeat, loads, seed),
            lambda name, size: launched(name, replace(settings, device_tokens=tokens[size])),
            *(keep, say),
            concurrency=concurrency,
            silence_s=silence,
            rate_s=rate,
            limit_s=60 * minutes,
            restart=restart,
        )
    found = summaries(measured, contenders[0])
    for summary in found:
        output.row(summary)
    for title in dict.fromkeys(summary.load for summary in found):
        at = f", {rate:g} requests/s" if rate else ""
        its = [one for one in found if one.load == title]
        output.show(summaries_table(its, f"{title}{at}, {model.name}"))
        for size in chosen:
            if turns := by_turn(measured, title, size):
                output.show(turns_table(turns, f"{title}{at}, {model.name}, by turn, device cache {size}"))
    if plot is not None and measured:
        title = measured[0].load
        draw_turns(by_turn(measured, title, measured[0].size), f"{title}, {model.name}", plot, restart)
    fail_with(problems)


def compare(
    contenders: Sequence[str],
    sizes: Sequence[Size],
    rounds: int,
    loads: Mapping[str, Shape],
    seed: int,
    launch: Launch,
    keep: Callable[[Measured], None],
    say: Say,
    *,
    concurrency: int,
    silence_s: float,
    rate_s: float | None = None,
    limit_s: float = 0.0,
    restart: bool = False,
) -> list[str]:
    """Measure; `keep` gets each contender's run as it ends. Each size has its share of `limit_s` (0: no
    limit): after the first, no round of a load begins that would end later, if it takes as long as the one
    before. `restart`: all processes of a contender, before the last turn. A contender that does not start, or
    no longer answers, is left out. Returns what went wrong, a line each.
    """
    began_s, problems = time.monotonic(), list[str]()
    servers: dict[str, Contender] = {}

    def leave_out(contender: str, why: str) -> None:
        servers.pop(contender, None)
        problems.append(why)
        say(f"left out: {why}")

    def restarted(name: str, before_turn: int, turns: int) -> None:
        if turns == before_turn:
            say(f"{name}: restarting")
            servers[name].restart()

    def one_round(size: Size, number: int, title: str, load: Load) -> None:
        order = list(servers)
        first = number % max(1, len(order))
        for name in (*order[first:], *order[:first]):
            say(f"{size} device cache, round {number + 1}: {name}: {title}: {len(load.requests)} requests")
            which = f"{title}, {size}, {name}"
            try:
                run = run_load(
                    *(Server(servers[name].url, silence_s), load, say),
                    concurrency=concurrency,
                    lockstep=rate_s is None,
                    between=partial(restarted, name, len(load.sessions[0]) - 1) if restart else None,
                )
            except HarnessError as error:
                leave_out(name, f"{which}: {error}")
                continue
            outcome = outcome_of(run)
            keep(Measured(load=title, size=size, contender=name, round=number, outcome=outcome))
            if failed := outcome.all.failed:
                problems.append(f"{which}: {failed} of {outcome.all.requests} requests failed")
                if failed == outcome.all.requests:
                    leave_out(name, f"{name} answers nothing")

    longest = max(loads.values(), key=lambda shape: make_load(shape, 0).longest_tokens)
    for at, size in enumerate(sizes):
        end_s = began_s + limit_s * (at + 1) / len(sizes) if limit_s else math.inf
        servers.clear()
        with ExitStack() as stack:
            for name in contenders:
                say(f"{size} device cache: starting {name}")
                try:
                    server = stack.enter_context(launch(name, size))
                    warm_up(Server(server.url, silence_s), longest)
                    servers[name] = server
                except HarnessError as error:
                    leave_out(name, f"{name}, {size}: {error}")
            took_s = dict.fromkeys(loads, 0.0)
            for number in range(rounds):
                for place, (title, shape) in enumerate(loads.items()):
                    round_s = time.monotonic()
                    if number and round_s + took_s[title] > end_s:
                        say(f"{number} of {rounds} rounds of {title}: another would take too long")
                        continue
                    load_seed = seed + place * SEEDS_OF_A_LOAD + number
                    one_round(size, number, title, make_load(shape, load_seed, rate_s))
                    took_s[title] = time.monotonic() - round_s
    return problems


def warm_up(server: Server, shape: Shape) -> None:
    """One conversation of two turns, of the load's lengths, so that a server's first work is not measured.
    Raises HarnessError where it cannot be reached.
    """
    short = replace(shape, users=1, rounds=min(2, shape.rounds), output_tokens=min(8, shape.output_tokens))
    run_load(server, make_load(short, WARM_UP_SEED), lambda line: None, tag="warm-up")


def cache_tokens(shapes: Sequence[Shape], share: float, concurrency: int, page_size: int = PAGE_SIZE) -> int:
    """The device's KV cache for all these loads, in whole pages: below 1, `share` is of the smallest, so that
    none fits, else of the largest; with room for `concurrency` of the longest sessions (0: of all), and a
    tenth more, in any case.
    """
    loads = [make_load(shape, 0) for shape in shapes]
    total = (min if share < 1 else max)(map(total_tokens, loads))
    longest = max(load.longest_tokens * (concurrency or len(load.sessions)) for load in loads)
    wanted = max(int(share * total), int(1.1 * longest)) + page_size
    return -(-wanted // page_size) * page_size


def summaries_table(found: Sequence[Summary], title: str) -> Table:
    """Medians of the contenders, and how they compare with the first."""
    columns = (
        *("device cache", "contender", "first token, turn 1, ms", "over", "from turn 2", "over", "p99"),
        *("inter-token", "prompt tokens/s from turn 2", "over", "cached", "could be", "failed"),
    )
    rows = [
        (
            *(one.size, one.contender, ms(one.first_turn_ms), times(one.over["first_turn_ms"])),
            *(ms(one.later_turns_ms), times(one.over["later_turns_ms"]), ms(one.later_p99_ms)),
            *(ms(one.inter_token_ms), ms(one.prompt_tokens_s), times(one.over["prompt_tokens_s"])),
            *(_percent(one.cached_share), _percent(one.reusable_share), str(one.failed or "-")),
        )
        for one in found
    ]
    return Table(title, columns, rows, left=columns[:2])


def turns_table(turns: Mapping[str, Sequence[Turn]], title: str) -> Table:
    """A row for each turn: of each contender the first token and the cached share."""
    columns = ("turn", *(f"{name}{what}" for name in turns for what in (", ms", ", cached")), "could be")
    rows = [
        (
            str(number),
            *(word for one in its for word in (ms(one.first_token_ms), _percent(one.cached_share))),
            _percent(its[0].reusable_share),
        )
        for number, its in enumerate(zip(*turns.values(), strict=False), 1)
    ]
    return Table(title, columns, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    script(main, __doc__)
