"""The generated parts of README.md. `python -m tests.support.readme` writes them, test_readme checks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pdserve.bench.serving.parts import Weights
from pdserve.bench.serving.report.goals import Row, goal_rows, times
from pdserve.bench.serving.report.weights_report import text
from pdserve.bench.serving.summary import Measured, summaries
from pdserve.bench.serving.sweep import Tried, best
from pdserve.engine.metric_names import METRICS as WORKER_METRICS
from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.client.metric_names import CLIENT_METRICS
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.metrics.names import METRICS as POOL_METRICS
from pdserve.metric import table
from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.names import METRICS as ROUTER_METRICS
from pdserve.settings.config_file import option_table
from pdserve.up.config import ClusterSettings

README = Path(__file__).parents[2] / "README.md"
RESULTS = README.parent / "pdserve" / "bench" / "results"
ROUNDS_OF_A_RUN = 1000  # more than any has

TABLES = {
    "[cluster] and <code>pdserve up</code>": ClusterSettings,
    "[router] and <code>pdserve router</code>": RouterConfig,
    "[worker], [[prefill]], [[decode]], [[agg]]; <code>pdserve prefill|decode|agg</code>": WorkerConfig,
    "[[pool]] and <code>pdserve pool serve</code>": PoolNodeConfig,
}


def options() -> str:
    """The option tables, each folded away under its title."""
    parts = [
        f"<details><summary>{title}</summary>\n\n{option_table(type_)}\n</details>\n"
        for title, type_ in TABLES.items()
    ]
    return "\n".join(parts)


METRICS = {
    "router: <code>/metrics</code> of its port, and of its admin port": ROUTER_METRICS,
    "workers: <code>/metrics</code> of their port, beside SGLang's own (<code>sglang:*</code>)": (
        *WORKER_METRICS,
        *CLIENT_METRICS,
    ),
    "pool nodes: <code>/metrics</code> of the address that <code>metrics</code> names": POOL_METRICS,
}


LISTED = [one for definitions in METRICS.values() for one in definitions]


def metrics() -> str:
    """All Prometheus metrics, by part."""
    parts = [
        f"<details><summary>{title}</summary>\n\n{table(definitions)}\n</details>\n"
        for title, definitions in METRICS.items()
    ]
    return "\n".join(parts)


def bench() -> str:
    """The pool's speed, from the raw lines of its last kept run."""
    lines = [json.loads(line) for line in sorted(RESULTS.glob("pool-*.jsonl"))[-1].read_text().splitlines()]
    run, rows = lines[0], lines[1:]
    peers = {row["page_bytes"]: {} for row in rows}
    for row in rows:
        if "peer" in row:
            peers[row["page_bytes"]][row["peer"]] = row["gbps"]
    stores = list(rows[0].get("peers", {}))  # each measured in the rounds of each of our rows
    columns = (
        "path",
        "page",
        "checksum",
        "memcpy GB/s",
        "get GB/s",
        "put GB/s",
        "get / memcpy",
        "put / memcpy",
    )
    more = (
        "one page, get, p50 / p99 µs",
        *(f"{name.capitalize()} get / put GB/s" for name in stores),
        "`ucx_perftest` GB/s, its settings / ours",
    )
    out = [
        f"`{run['command']}`, {run['date'][:10]}, {run['machine']}; UCX {run['versions']['ucx']} over TCP",
        "loopback; batches of 32 pages, medians; get, put and memcpy interleaved. Raw lines:",
        "`pdserve/bench/results/`.\n",
        f"| {' | '.join(columns + more)} |",
        "|---" * len(columns + more) + "|",
    ]
    for row in rows:
        if "peer" in row:
            continue
        size = row["page_bytes"]
        of_stores = "".join(
            f"| {peer['get_gbps']:.1f} / {peer['put_gbps']:.1f} " for peer in row.get("peers", {}).values()
        )
        beside = peers[size] if row["path"] == "ucx" else {}
        out.append(
            f"| {row['path']} | {size // 1024} KiB | {row['checksum']} | {row['memcpy_gbps']:.1f} "
            f"| {row['get_gbps']:.1f} | {row['put_gbps']:.1f} "
            f"| {row['get_over_memcpy']:.2f} | {row['put_over_memcpy']:.2f} "
            f"| {row['single_get_p50_us']:.0f} / {row['single_get_p99_us']:.0f} "
            f"{of_stores}| {' / '.join(f'{gbps:.1f}' for gbps in beside.values())} |"
        )
    return "\n".join(out) + "\n"


def policies() -> str:
    """Hit rates of the eviction policies, from the raw lines of the last kept run."""
    newest = sorted(RESULTS.glob("policies-*.jsonl"))[-1]
    run, *rows = [json.loads(line) for line in newest.read_text().splitlines()]
    names = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["capacity_blocks"]), {})[row["policy"]] = row["hit_rate"]
    out = [
        f"`{run['command']}`, {run['date'][:10]}: blocks hit by prefix, %. Raw lines:",
        "`pdserve/bench/results/`.\n",
        f"| trace | blocks held | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for (trace, capacity), rates in cells.items():
        best = max(rates.values())
        shown = (f"**{100 * rates[n]:.1f}**" if rates[n] == best else f"{100 * rates[n]:.1f}" for n in names)
        out.append(f"| {trace} | {capacity:,} | {' | '.join(shown)} |")
    return "\n".join(out) + "\n"


def serving() -> str:
    """Conversations beside other servers, from the raw lines of the kept runs: the last ones, of comparisons
    also those of the same command before, so that a disturbed hour decides nothing alone.
    """
    kinds = sorted({path.name.rpartition("-20")[0] for path in RESULTS.glob("compare-*.jsonl")}, reverse=True)
    compared = [(lines[0], _measured(lines)) for lines in map(_alike, kinds)]
    found = [summaries(measured, run["against"][0]) for run, measured in compared]
    out = [
        *_goals(
            [row for each in found for row in goal_rows(each, _hop_ms())]
        ),  # ratios within a command's runs
        *(line for run, measured in compared for line in _compared(run, measured)),
        *_swept(),
        *_weighed("weights"),
        *_weighed("overlap"),
    ]
    return "\n".join(out or ["`launch/bench.sh` measures it; no run is kept yet."]) + "\n"


def _newest(kind: str) -> list[dict[str, Any]]:
    """The lines of the last kept run of a kind; none where there is none."""
    kept = sorted(RESULTS.glob(f"{kind}-[0-9]*.jsonl"))
    return [json.loads(line) for line in kept[-1].read_text().splitlines()] if kept else []


def _alike(kind: str) -> list[dict[str, Any]]:
    """The lines of all kept runs of the last one's command on its machine, the last one's origin first; each
    run's rounds with numbers of their own. They may be of several commits, which are named; `+`: with changes
    that were not committed then.
    """
    runs = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(RESULTS.glob(f"{kind}-[0-9]*.jsonl"), reverse=True)
    ]
    last = runs[0][0]
    alike = [run for run in runs if all(run[0][name] == last[name] for name in ("command", "machine"))]
    dates = " and ".join(sorted({run[0]["date"][:10] for run in alike}))
    commits = ", ".join(dict.fromkeys(run[0]["commit"] for run in reversed(alike)))
    return [
        {**last, "date": f"{dates} at {commits}"},
        *(
            {**line, "round": number * ROUNDS_OF_A_RUN + line["round"]} if "round" in line else line
            for number, run in enumerate(alike)
            for line in run[1:]
        ),
    ]


def _measured(lines: list[dict[str, Any]]) -> list[Measured]:
    return [msgspec.convert(line, Measured) for line in lines if "outcome" in line]


def _hop_ms() -> float | None:
    """From the end of the prefill until the decode worker has the pages, of a first turn."""
    found = _weights(_newest("weights"))
    return found[0].parts.get("publish", 0.0) + found[0].parts.get("pull", 0.0) if found else None


def _goals(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    out = ["| goal | load | what serves | measured | met |", "|---" * 5 + "|"]
    for row in rows:
        met = {True: "yes", False: "**no**", None: "-"}[row.met]
        out.append(f"| {row.goal} | {row.load} | {row.contender} | {row.measured} | {met} |")
    return [*out, ""]


def _compared(run: dict[str, Any], measured: list[Measured]) -> list[str]:
    columns = (
        *(
            "device cache",
            "what serves",
            "rounds",
            "first token, turn 1, ms",
            "over",
            "from turn 2, ms",
            "over",
        ),
        *("prompt tokens/s from turn 2", "over", "cached, %", "from storage, %", "could be, %", "failed"),
    )
    out = [
        f"`{run['command']}`, {run['date']}, {run['machine']}; medians of all rounds,",
        "ratios medians of the rounds' own.",
        "",
    ]
    found = summaries(measured, run["against"][0])
    for load in dict.fromkeys(one.load for one in found):
        out += [f"{load}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for one in found:
            if one.load != load:
                continue
            cells = (
                *(one.size, one.contender, str(one.rounds)),
                *(_figure(one.first_turn_ms), times(one.first_turn_over)),
                *(_figure(one.later_turns_ms), times(one.later_turns_over)),
                *(_figure(one.prompt_tokens_s), times(one.prompt_tokens_s_over)),
                *map(_share, (one.cached_share, one.storage_share, one.reusable_share)),
                str(one.failed),
            )
            out.append(f"| {' | '.join(cells)} |")
        out.append("")
    return out


def _swept() -> list[str]:
    lines = _newest("sweep")
    if not lines:
        return []
    run, rates = lines[0], [line for line in lines[1:] if "rate_s" in line]
    chosen = best([msgspec.convert(rate, Tried) for rate in rates])
    out = [
        f"`{run['command']}`, {run['date'][:10]}, {run['machine']}; {run['load']}; highest rate that holds:",
        f"{f'{chosen.rate_s:.3g} asks/s' if chosen else 'none'}.\n",
        "| asks/s | in time, % | asks in time/s | first token p50, ms | p99 | failed |",
        "|---" * 6 + "|",
    ]
    for rate in sorted(rates, key=lambda one: one["rate_s"]):
        whole = rate["outcome"]["all"]
        first = whole["first_token_ms"]
        cells = (f"{rate['rate_s']:.3g}", f"{100 * rate['in_time']:.0f}", f"{rate['goodput_s']:.3g}")
        more = (_figure(first["p50"]), _figure(first["p99"]), str(whole["failed"]))
        out.append(f"| {' | '.join((*cells, *more))} |")
    return [*out, ""]


def _weighed(kind: str) -> list[str]:
    lines = _newest(kind)
    if not lines:
        return []
    run, turns = lines[0], _weights(lines)
    head = f"`{run['command']}`, {run['date'][:10]}, {run['machine']}; {run['load']}:"
    return [head, "", "```text", *(line for turn in turns for line in text(turn)), "```", ""]


def _weights(lines: list[dict[str, Any]]) -> list[Weights]:
    return [msgspec.convert(line, Weights) for line in lines if "parts" in line]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def with_block(text: str, name: str, block: str) -> str:
    """`text` with the lines between the markers of `name` replaced."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return head + begin + block + end + rest.split(end, 1)[1]


def generated(text: str) -> str:
    """README.md as it should be."""
    for name, block in (
        ("options", options()),
        ("bench", bench()),
        ("serving", serving()),
        ("metrics", metrics()),
        ("policies", policies()),
    ):
        text = with_block(text, name, block)
    return text


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
