"""A rendered cluster of a pool node, a prefill worker, a decode worker and a router, with real SGLang:
each pod with the command, user, volumes, names, variables, probes and stop hook of its file.
"""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from pdserve.router.request.cache_report import parse_cached
from tests.support.e2e.prompts import PAGE
from tests.support.kubernetes.pods import NODE, Pod, Said
from tests.support.kubernetes.stage import Stage, secret, staged, until

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(600)]

FILE: Final = """
[cluster]
name = "small"

[router]
access = { keys_file = "keys" }
min_prefill_tokens = 0

[worker]
env = { OMP_NUM_THREADS = "1" }

[worker.engine]
model_path = "demo-tiny"
dtype = "float32"
context_length = 4096
max_total_tokens = 20000
hicache_size_gb = 1

[[pool]]
capacity_bytes = "128MiB"
slab_bytes = "4MiB"

[[prefill]]

[[decode]]
"""
POOL, PREFILL, DECODE, ROUTER = "small-pool-0", "small-prefill-0", "small-decode-0", "small-router-x"
CHAT: Final = "/v1/chat/completions"
STREAMED: Final = 600
"""Tokens: so many that the stream is not over when its worker is asked to end."""
FIRST: Final = {"role": "user", "content": "Tell me about the sea, the wind and the ships. " * 12}
SECOND: Final = {"role": "user", "content": "And the harbours?"}


def test_a_rendered_cluster_starts_answers_from_its_pool_and_ends_without_losing_a_stream(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / model.name).symlink_to(model)
    with staged(tmp_path, FILE, tmp_path / "claim") as stage:
        pods = {name: stage.pod(name) for name in (POOL, PREFILL, DECODE, ROUTER)}
        stage.start_api()
        for pod in pods.values():
            pod.start(stage.hosts)
        stage.show(*pods.values())
        for pod in pods.values():
            pod.await_started()
        until(lambda: json.loads(stage.ask(pods[ROUTER], "/ready").text)["degraded"] == [], pods[ROUTER])
        answers_come_from_the_pool(stage, pods)
        a_stream_of_a_pod_that_ends_is_whole(stage, pods[ROUTER], pods[DECODE])
        with ThreadPoolExecutor(3) as kubelets:
            rest = [pods[name] for name in (ROUTER, PREFILL, POOL)]
            for pod, ended in zip(rest, kubelets.map(Pod.stop, rest), strict=True):
                assert ended[:2] == (0, 0), pod.log()
        for pod in pods.values():
            assert pod.processes == [], pod.name
            said = pod.log_path.read_text()
            assert "Traceback" not in said, said
            assert "passed over" not in said, said


def answers_come_from_the_pool(stage: Stage, pods: dict[str, Pod]) -> None:
    """Turn one by what prefill computed, turn two by what decode wrote too, with nothing in the workers."""
    token, router, decode = secret("cluster-token"), pods[ROUTER], pods[DECODE]
    first = asked(stage, router, stage.key, FIRST)
    assert cached(first)["pool"] >= PAGE
    plain = asked(stage, decode, token, FIRST, cache_salt="of nobody else")
    assert sum(cached(plain).values()) == cached(plain)["computed"]
    assert text(plain) == text(first)
    turns = [FIRST, {"role": "assistant", "content": text(first)}, SECOND]
    for pod in (decode, pods[PREFILL]):
        until(lambda pod=pod: stage.ask(pod, "/flush_cache", token, {}).status == 200, pod)  # type: ignore[misc]
    second = asked(stage, router, stage.key, *turns)
    assert cached(second)["pool"] >= cached(first)["pool"] + PAGE
    again = asked(stage, router, stage.key, *turns)
    assert cached(again)["device"] >= cached(second)["pool"]
    assert text(again) == text(second)


def asked(stage: Stage, pod: Pod, key: str, *messages: dict[str, str], **more: Any) -> Said:
    """A greedy answer of a page and some."""
    said = stage.ask(pod, CHAT, key, body_of(*messages, max_tokens=PAGE + 8, **more))
    assert said.status == 200, said.text
    return said


def body_of(*messages: dict[str, str], **more: Any) -> dict[str, Any]:
    common = {"model": "demo-tiny", "temperature": 0, "ignore_eos": True}
    return {**common, "messages": list(messages), **more}


def cached(said: Said) -> dict[str, int]:
    """Tokens of the prompt by where its worker found them."""
    return parse_cached(said.headers["x-pdserve-cached"])


def text(said: Said) -> str:
    content: str = json.loads(said.text)["choices"][0]["message"]["content"]
    return content


def a_stream_of_a_pod_that_ends_is_whole(stage: Stage, router: Pod, decode: Pod) -> None:
    begun, lines = threading.Event(), []
    body = body_of(FIRST, max_tokens=STREAMED, stream=True, stream_options={"include_usage": True})

    def read() -> None:
        connection = http.client.HTTPConnection(router.address, router.ports["http"], timeout=60)
        connection.request("POST", CHAT, json.dumps(body), {"authorization": f"Bearer {stage.key}"})
        answer = connection.getresponse()
        for line in answer:
            lines.append(line)
            begun.set()
        connection.close()

    with ThreadPoolExecutor(2) as threads:
        client = threads.submit(stage.network.call, NODE, read)
        assert begun.wait(60)
        kubelet = threads.submit(decode.stop)
        until(lambda: not decode.probe("readinessProbe"), decode)
        assert not client.done(), f"the stream was over too early: {len(lines)}"
        ended = kubelet.result()
        client.result()
    assert ended[:2] == (0, 0), decode.log()
    assert ended.took_s < decode.spec["terminationGracePeriodSeconds"]
    chunks = [line.removeprefix(b"data: ") for line in lines if line.strip()]
    assert chunks[-1].strip() == b"[DONE]"
    assert json.loads(chunks[-2])["usage"]["completion_tokens"] == STREAMED
