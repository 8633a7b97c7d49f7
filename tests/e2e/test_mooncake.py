"""Mooncake Store in place of pool nodes (`pool.engine = "mooncake"`), over TCP, with real SGLang: the same
answers as plain SGLang, pages that outlive their worker, and a store that dies.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.cluster import Router, Worker, eventually, http
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import found, generate, say, wanted_hits
from tests.support.e2e.site import NEEDS, Reference, Site, ask_all
from tests.support.mooncake import is_installed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not is_installed(),
        reason="MOONCAKE IS NOT TESTED: pip install '.[mooncake]' to test pool.engine = \"mooncake\"",
    ),
]


@dataclass
class OnMooncake:
    prefill: Worker
    decode: Worker
    router: Router


@pytest.fixture(scope="module")
def on_mooncake(site: Site, run_dir: Path) -> Iterator[OnMooncake]:
    prefill, decode = (site.servers.workers[name] for name in NEEDS["on_mooncake"])
    router = Router(run_dir, [prefill], [decode], name="router-mooncake")
    try:
        router.start()
        yield OnMooncake(prefill, decode, router)
    finally:
        router.stop()


def test_a_worker_says_at_its_start_what_the_store_lacks(on_mooncake: OnMooncake) -> None:
    said = on_mooncake.decode.process.log.read_text()  # type: ignore[union-attr]
    assert "the store mooncake has no quotas" in said
    assert http.get(f"{on_mooncake.decode.url}/pd/ready").json()["pool"] == "up"


def test_answers_of_both_turns_equal_plain_sglang_and_are_handed_over_by_the_store(
    on_mooncake: OnMooncake, reference: Reference
) -> None:
    for prompts, wanted in (
        (reference.prompts, reference.first),
        (reference.second_prompts, reference.second),
    ):
        answers, cached = [], []
        for prompt in prompts:
            response = generate(on_mooncake.router, prompt)
            assert response.status_code == 200, response.text
            answers.append(Answer.of(response.json()))
            cached.append(sum(found(response).values()))
        assert differences(wanted, answers, say(prompts)) == []
        assert cached == [wanted_hits(prompt) for prompt in prompts]


def test_a_worker_that_starts_anew_finds_the_earlier_turn(
    on_mooncake: OnMooncake, reference: Reference
) -> None:
    worker = on_mooncake.decode
    prompt = token_ids(seed=77, length=5 * PAGE)
    sampling = {"temperature": 0, "max_new_tokens": 2 * PAGE, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    headers = {"x-request-id": "first"}
    answered = http.post(f"{worker.url}/generate", json=body, headers=headers, timeout=120.0).json()
    settled = http.post(
        f"{worker.url}/pd/settled", json={"request_id": "first", "timeout_s": 20.0}, timeout=30.0
    ).json()
    assert (settled["known"], settled["settled"]) == (True, True)
    second = [*prompt, *Answer.of(answered).tokens, *token_ids(seed=78, length=20)]
    worker.flush()
    stored = worker.generate(second, NEW_TOKENS)
    worker.end()
    worker.start().wait_ready()
    again = worker.generate(second, NEW_TOKENS)
    assert differences([Answer.of(stored)], [Answer.of(again)], str) == []
    assert again["meta_info"]["cached_tokens_details"]["storage"] >= 6 * PAGE
    eventually(lambda: not on_mooncake.router.lacks, "the router knows that the worker is back", 60.0)


def test_answers_stay_right_while_the_store_is_dead(
    on_mooncake: OnMooncake, reference: Reference, site: Site
) -> None:
    """The last test of the store: it is dead afterwards."""
    masters = [one for one in psutil.Process().children(recursive=True) if "mooncake_master" in one.name()]
    for master in masters:
        master.send_signal(signal.SIGKILL)
    assert len(masters) == 1
    prompts, wanted = reference.prompts[::8], reference.first[::8]
    on_mooncake.decode.flush()
    assert differences(wanted, ask_all(on_mooncake.decode, prompts), say(prompts)) == []
    eventually(
        lambda: http.get(f"{on_mooncake.decode.url}/pd/ready").json()["pool"] == "down",
        "the worker says that its pool is down",
        30.0,
    )
    for prompt, answer in zip(prompts[:3], wanted[:3], strict=True):
        response = generate(on_mooncake.router, prompt)
        assert response.status_code == 200
        assert differences([answer], [Answer.of(response.json())], str) == []
