"""What real workers show: their metrics, and where a stream's first token spent its time."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial

import pytest

from docs.generate.product import LISTED
from pdserve.engine.metric_names import METRICS
from pdserve.kvpool.hicache.client_metrics import CLIENT_METRICS
from pdserve.metric import Definition
from pdserve.router.request.reports import parse_cached
from tests.support.e2e.cluster import Router, Worker, eventually, http, metric, pdserve
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
CACHED = "sglang:cached_tokens_total"


def shown(worker: Worker) -> dict[str, str]:
    """Our metrics at a worker's /metrics: name to type."""
    text = http.get(f"{worker.url}/metrics").text
    return dict(re.findall(r"^# TYPE (pdserve_\S+) (\S+)$", text, re.M))


def check_stream(router: Router, salt: str) -> None:
    """A prompt that nobody has: the stream begins with the prefill worker's token, and the parts add up."""
    prompt = f"{salt} " + "the quick brown fox jumps over the lazy dog " * 60
    body = {"model": "demo-tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    answer = http.post(f"{router.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    timing = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(timing) == ["prefill", "publish", "decode", "router"]
    assert float(timing["prefill"]) > 0
    assert parse_cached(answer.headers["x-pdserve-prefill-cached"])["computed"] > 500
    assert "x-pdserve-cached" not in answer.headers, "the decode worker has not looked yet"


def ask_later_turn(worker: Worker) -> None:
    """A chat with an earlier answer, of which nobody has a page, straight to the worker."""
    turns = [("user", f"{worker.name} in test_see " * 60), ("assistant", "Hi"), ("user", "And now?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    chat = {"model": "demo-tiny", "messages": messages, "max_tokens": 1}
    answer = http.post(f"{worker.url}/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text


def check_metrics(prefill: Worker, decode: Worker) -> None:
    """Every metric of the list is there, of its type, and no other of ours."""
    listed: tuple[Definition, ...] = (*METRICS, *CLIENT_METRICS)
    assert set(listed) <= set(LISTED)
    wanted = {one.full_name: one.kind for one in listed}
    for worker in (prefill, decode):  # what was missed is counted after the answer
        eventually(partial(_shows, worker, wanted), f"{worker.name} shows {sorted(wanted)}", 10.0)
        assert shown(worker) == wanted, worker.name


def _shows(worker: Worker, wanted: dict[str, str]) -> bool:
    return shown(worker).keys() >= wanted.keys()


def test_a_stream_says_where_its_first_token_spent_its_time(cluster: Cluster) -> None:
    check_stream(cluster.pairs[0], "test_see")


def test_workers_show_all_their_metrics_and_no_other(cluster: Cluster) -> None:
    check_stream(cluster.pairs[0], "metrics of test_see")
    for worker in (cluster.prefill[0], cluster.decode[0]):
        ask_later_turn(worker)
    check_metrics(cluster.prefill[0], cluster.decode[0])


def test_sglangs_own_count_of_cached_tokens_is_what_the_decode_worker_found(cluster: Cluster) -> None:
    """The client is told what the prefill worker found, which is nothing of a new prompt."""
    decode = cluster.decode[0]
    before = metric(decode.url, CACHED)
    prompt = "counted in test_see " + "the quick brown fox jumps over the lazy dog " * 60
    body = {"model": "demo-tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = http.post(f"{cluster.pairs[0].url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    own = dict(part.split("=") for part in answer.headers["x-pdserve-cached"].split(", "))
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    assert details.get("cached_tokens", 0) == 0
    assert int(own["pool"]) > 0
    eventually(lambda: metric(decode.url, CACHED) > before, "the decode worker counts", 10.0)
    assert metric(decode.url, CACHED) - before == int(own["device"]) + int(own["host"]) + int(own["pool"])


def check_doctor(router: Router) -> None:
    """A cluster that is well has nothing that fails; its live probe says where every token came from."""
    said = subprocess.run(
        pdserve("doctor", "--json", "--no-self-check", "--router", router.url),
        capture_output=True,
        text=True,
        timeout=240,
    )
    findings = json.loads(said.stdout)["findings"]
    assert [one for one in findings if one["level"] == "fail"] == [], said.stderr
    probed = [one["says"] for one in findings if one["check"] == "live probe" and one["level"] == "ok"]
    assert len(probed) == 2
    assert "turn 1, 263 tokens" in probed[0]
    assert "prefill: 263 computed; decode: 256 pool + 7 computed" in probed[0]
    assert {"alike", "live probe"} <= {one["check"] for one in findings}


def test_the_doctor_finds_nothing_wrong_and_follows_a_prompt_through_the_pool(cluster: Cluster) -> None:
    check_doctor(cluster.pairs[0])
