"""The Prometheus metrics that a worker adds to SGLang's own (`sglang:*`), but for those of its pool client
(pdserve/kvpool/hicache/page_access.py). Pure.
"""

from __future__ import annotations

from typing import Final

from pdserve.metric import Definition

PREFIX: Final = "pdserve_worker_"
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

METRICS: Final = (
    Definition(
        "first_token_seconds",
        "histogram",
        ("part",),
        "Requests: the parts of the time to the first token here. queue: waiting to be computed; pull: "
        "waiting for pages of the pool; compute: the prompt's rest; publish (prefill workers): until its "
        "pages are in the pool.",
        PREFIX,
    ),
    Definition(
        "prompt_tokens",
        "counter",
        ("tier",),
        "Prompt tokens by where they came from: device, host, pool, computed.",
        PREFIX,
    ),
    Definition(
        "missed_tokens",
        "counter",
        ("reason",),
        "Prompt tokens of full pages that no cache had, by what became of the first of them in the pool: "
        "never_stored, evicted, over_quota, expired, dropped, not_fetched (it was there), unknown.",
        PREFIX,
    ),
    Definition(
        "exact_turns",
        "counter",
        ("outcome",),
        "Chat prompts with earlier answers, by whether these got the tokens that they were made of. spliced: "
        "some did, and their text has others; same: their text has the same; unknown: no record, or the "
        "template shows the answer otherwise; late: the pool gave none in time; lost: a record that the "
        "prefill worker used is gone; too_long: they would not fit; refused: a false record; not_cut: the "
        "prompt cannot be cut at stop tokens; direct: a direct hand-off, which is left alone.",
        PREFIX,
    ),
    Definition(
        "fetch_steps",
        "histogram",
        ("outcome",),
        "Requests for whose pages the pool was asked: the scheduler's steps after the one that they came "
        "with, until they were admitted, on each rank. hit: with pages of the pool; miss: with none.",
        PREFIX,
    ),
    Definition(
        "fetches_declined",
        "counter",
        ("reason",),
        "Fetches from the pool that were put off or given up for lack of host memory, on each rank. "
        "others_under_way: half of it waits for other pages; larger_than_host_memory: a request's pages do "
        "not fit into all of it.",
        PREFIX,
    ),
)
