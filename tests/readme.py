"""The generated parts of README.md: `python -m tests.readme` writes them, test_readme.py checks them."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.config import option_table
from pdserve.engine.metric_names import METRICS as WORKER_METRICS
from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.metric_names import CLIENT_METRICS
from pdserve.kvpool.metric_names import METRICS as POOL_METRICS
from pdserve.metric import table
from pdserve.router.config import RouterConfig
from pdserve.router.metric_names import METRICS as ROUTER_METRICS
from pdserve.up.config import ClusterSettings

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "pdserve" / "bench" / "results"

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
        ("metrics", metrics()),
        ("policies", policies()),
    ):
        text = with_block(text, name, block)
    return text


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
