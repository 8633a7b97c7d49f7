"""The Prometheus metrics of a pool client, with their meanings. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.metric import Definition

CLIENT_PREFIX: Final = "pdserve_pool_client_"


CLIENT_METRICS: Final = (
    Definition(
        "pages",
        "counter",
        ("result",),
        "KV pages by what became of them: read, missed, written, present (another had written it), refused "
        "(no room), lost, corrupt, forged (the tag was made without the page key), and of those read: ssd "
        "(a node brought them up from a tier below its memory).",
        CLIENT_PREFIX,
    ),
    Definition(
        "bytes",
        "counter",
        ("direction",),
        "KV bytes read from the pool and written to it, by direction.",
        CLIENT_PREFIX,
    ),
    Definition(
        "transfer_seconds",
        "histogram",
        ("direction",),
        "Time of a batch of pages read or written, from the first request to the last "
        "byte. Throughput is the rate of the bytes divided by the rate of this sum.",
        CLIENT_PREFIX,
    ),
    Definition(
        "failures",
        "counter",
        (),
        "Operations on nodes that ended with an error or at a deadline.",
        CLIENT_PREFIX,
    ),
)
"""The metrics of a worker's pool client."""
