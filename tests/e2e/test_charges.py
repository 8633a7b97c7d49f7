"""What a tenant is charged is what SGLang counts, over a mix of requests to real workers.

SGLang's own counts are read from its answers: `usage`, or each answer's `meta_info`, where a prompt counts
once. tests/router/request/test_charges.py draws many more such mixes, before a worker that is made for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.e2e.cluster import Router, Worker, eventually, http
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHAT, COMPLETIONS, GENERATE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"
REQUESTS = 18
NEW_TOKENS = 8
SETTLED_S = 20.0


@dataclass(frozen=True)
class Counts:
    """Tokens; `most` of an output that nobody has read to its end."""

    prompt: int
    output: int
    most: int


def mix(dice: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all kinds: lists of prompts, several answers, streams."""

    def text() -> str:
        return " ".join(
            dice.choice(["page", "Cache", "über", "日本", "x=1"]) for _ in range(dice.randint(1, 200))
        )

    def token_ids() -> list[int]:
        return [dice.randrange(20, 400) for _ in range(dice.randint(1, 200))]

    def one_or_more(make: Any) -> Any:
        return make() if dice.random() < 0.5 else [make() for _ in range(dice.randint(1, 3))]

    found = []
    for number in range(REQUESTS):
        path = [CHAT, COMPLETIONS, GENERATE, GENERATE, COMPLETIONS, TOKENIZE][number % 6]
        n, tokens = dice.choice([1, 1, 2, 3]), dice.randint(1, NEW_TOKENS)
        prompt = one_or_more(dice.choice([text, token_ids]))
        is_text = isinstance(prompt[0], str)
        streams: dict[str, Any] = {"stream": True} if dice.random() < 0.5 else {}
        if path == TOKENIZE:
            body: dict[str, Any] = {"prompt": one_or_more(text)}
        elif path == GENERATE:
            sampling = {"n": n, "max_new_tokens": tokens, "temperature": 0.7}
            body = {"text" if is_text else "input_ids": prompt, "sampling_params": sampling, **streams}
        else:
            if streams:
                options = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.5}
                streams |= {"stream_options": options}
            messages = [{"role": role, "content": text()} for role in ("system", "user")]
            asks = {"messages": messages} if path == CHAT else {"prompt": prompt, "best_of": n}
            body = asks | {"n": n, "max_tokens": tokens, "temperature": 0.7, **streams}
        found.append((path, {"model": "demo-tiny"} | body))
    return found


def sglangs_own(path: str, body: dict[str, Any], answer: bytes) -> Counts:
    """The counts in an answer."""
    if path == TOKENIZE:
        count = json.loads(answer)["count"]
        return Counts(sum(count) if isinstance(count, list) else count, 0, 0)
    said = list(pieces(answer)) if body.get("stream") else [json.loads(answer)]
    if path != GENERATE:
        usage = next(one["usage"] for one in reversed(said) if one.get("usage"))
        return Counts(usage["prompt_tokens"], usage["completion_tokens"], usage["completion_tokens"])
    answers = said[0] if isinstance(said[0], list) else said
    last = {
        one.get("index", i if not body.get("stream") else 0): one["meta_info"]
        for i, one in enumerate(answers)
    }
    n = body["sampling_params"]["n"]
    prompt = sum(last[index]["prompt_tokens"] for index in sorted(last) if index % n == 0)
    output = sum(meta["completion_tokens"] for meta in last.values())
    return Counts(prompt, output, output)


def pieces(stream: bytes) -> Iterator[Any]:
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def charged(router: Router) -> tuple[int, int]:
    """Prompt and output tokens of the one tenant of a router without keys, all requests together."""
    families = text_string_to_metric_families(http.get(f"{router.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    of_kind = {s.labels["kind"]: int(s.value) for s in samples if s.name.endswith("_tenant_tokens_total")}
    return of_kind.get("prompt", 0), of_kind.get("output", 0)


def silent_streams() -> list[tuple[str, dict[str, Any], int]]:
    """Streams whose client asks for no usage, and the tokens of their output."""
    chat = {"messages": [{"role": "user", "content": "page über cache"}], "max_tokens": 7}
    found = []
    for n in (1, 3):
        more = {"model": "demo-tiny", "n": n, "temperature": 0.7, "ignore_eos": True, "stream": True}
        completion = {"prompt": ["page page", "cache"], "max_tokens": 5}
        found += [(CHAT, chat | more, 7 * n), (COMPLETIONS, completion | more, 10 * n)]
        found.append((COMPLETIONS, {"prompt": "page", "max_tokens": 9} | more, 9 * n))
    return found


def abandoned(router: Router, body: dict[str, Any], events: int) -> int:
    """Leave a stream after so many events; how many tokens were seen."""
    seen = b""
    with http.stream("POST", router.url + GENERATE, json=body | {"stream": True}) as response:
        for piece in response.iter_raw():
            seen += piece
            if seen.count(b"\n\n") >= events:
                break
    whole = seen[: seen.rfind(b"\n\n") + 2]
    return max(int(one["meta_info"]["completion_tokens"]) for one in pieces(whole))


def check(router: Router) -> None:
    """Every request of the mix alone, streams that say no usage, and one that its client leaves."""

    def is_idle() -> bool:
        return not sum(worker["in_flight"] for worker in http.get(f"{router.url}/ready").json()["workers"])

    for path, body in mix(random.Random(16)):
        before = charged(router)
        answer = http.post(router.url + path, json=body, timeout=120.0)
        assert answer.status_code == 200, answer.text
        expected = sglangs_own(path, body, answer.content)
        eventually(is_idle, "the answer is accounted for", SETTLED_S)
        after = charged(router)
        said = (after[0] - before[0], after[1] - before[1])
        assert said == (expected.prompt, expected.output), (path, body)
    for path, body, output in silent_streams():
        plain = http.post(router.url + path, json=body | {"stream": False}, timeout=120.0).json()["usage"]
        assert plain["completion_tokens"] == output
        eventually(is_idle, "the answer is accounted for", SETTLED_S)
        before = charged(router)
        assert b"pd-usage" not in http.post(router.url + path, json=body, timeout=120.0).content
        eventually(is_idle, "the stream is accounted for", SETTLED_S)
        after = charged(router)
        said = (after[0] - before[0], after[1] - before[1])
        assert said == (plain["prompt_tokens"], output), (path, body)
    sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    before = charged(router)
    seen = abandoned(router, {"input_ids": list(range(20, 97)), "sampling_params": sampling}, 5)
    eventually(is_idle, "the router has let it go", SETTLED_S)
    after = charged(router)
    assert after[0] - before[0] == 77
    assert seen <= after[1] - before[1] <= 400


@pytest.mark.extended
def test_an_aggregated_worker_and_its_router_count_alike(agg_worker: Worker, run_dir: Path) -> None:
    with Router(run_dir, agg=[agg_worker], name="router-charges") as router:
        check(router)


def test_a_disaggregated_pair_and_its_router_count_alike(cluster: Cluster) -> None:
    check(cluster.pairs[1])
