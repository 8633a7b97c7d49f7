"""SmolLM2-135M, whose answers are words: prefill → pool → decode says what plain SGLang says, and a wrong
page shows in the words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.engine.demo.smollm2 import NAME, make_smollm2
from pdserve.errors import StartupError
from pdserve.pages import page_hashes
from tests.support.e2e.arena import flip, page_offset
from tests.support.e2e.cluster import PoolNode, Router, Worker, http, started
from tests.support.e2e.prompts import LOGPROB_TOLERANCE, PAGE, differences
from tests.support.e2e.routed import ask, found, say, wanted_hits
from tests.support.e2e.site import ask_cold, engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parent.parent.parent
RULES = {"role": "system", "content": "Answer in one short sentence. " * 60}
OF_FRANCE = {"role": "user", "content": "What is the capital of France?"}
PARIS = {"role": "assistant", "content": "The capital of France is Paris."}
OF_ITALY = {"role": "user", "content": "And of Italy?"}
TURNS = ([RULES, OF_FRANCE], [RULES, OF_FRANCE, PARIS, OF_ITALY])
SEGMENTS = [30 * 3 * 64 * PAGE * 4] * 2
"""Keys and values of a page: 30 layers with 3 heads of 64, in float32."""


@dataclass
class Real:
    """A disaggregated pair without checksums, and plain SGLang."""

    pool: PoolNode
    prefill: Worker
    decode: Worker
    router: Router
    plain: Worker
    tokenizer: Any

    def flush(self) -> None:
        for worker in (self.prefill, self.decode):
            worker.flush()

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(prompt, add_special_tokens=False))

    def cold(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """What plain SGLang answers that has computed nothing before."""
        self.plain.flush()
        return choice(chat(self.plain.url, messages))


@pytest.fixture(scope="module")
def real_model() -> Path:
    """In this checkout, where the launch scripts have it too."""
    try:
        return make_smollm2(ROOT / "models" / NAME)[0]
    except StartupError as error:
        if str(error).startswith("cannot download"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def real(real_model: Path, run_dir: Path) -> Iterator[Real]:
    from transformers import AutoTokenizer

    sizes = {"max_total_tokens": 3072, "hicache_size_gb": 0, "hicache_ratio": 2.0}
    engine = engine_settings(real_model, 2048, served_model_name=NAME, **sizes)
    pool = PoolNode(run_dir, "realpool")
    pages = {"nodes": [pool.ref], "checksum": False}
    plain = Worker("agg", "real-plain", run_dir, engine, settings={"storage": "none"})
    patient = {"commit_timeout_s": 30.0}  # pages of 3 MB, on a busy machine
    prefill = Worker("prefill", "real-prefill", run_dir, engine, pages, patient)
    decode = Worker("decode", "real-decode", run_dir, engine, pages)
    with (
        started(pool, plain, prefill, decode),
        Router(run_dir, [prefill], [decode], name="real-router") as router,
    ):
        yield Real(pool, prefill, decode, router, plain, AutoTokenizer.from_pretrained(real_model))


def chat(url: str, messages: list[dict[str, str]], **headers: str) -> httpx.Response:
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 24, "logprobs": True}
    answer = http.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return answer


def choice(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["choices"][0])


def logprobs(one: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in one["logprobs"]["content"]]


def test_a_conversation_of_two_turns_is_right_and_comes_from_the_pool(real: Real) -> None:
    first = chat(real.router.url, TURNS[0], **{"x-request-id": "of-france"})
    assert choice(first)["message"]["content"] == PARIS["content"]
    assert real.decode.has_settled("of-france")
    real.flush()
    second = chat(real.router.url, TURNS[1])
    assert choice(second)["message"]["content"] == "The capital of Italy is Rome."

    prompts = [real.tokens(turn) for turn in TURNS]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in (first, second)] == [*map(len, prompts)]
    assert found(first)["pool"] == wanted_hits(prompts[0])
    # what the first turn left there: its prompt, and its answer but for the last token
    conversation = len(prompts[0]) + first.json()["usage"]["completion_tokens"]
    kept = (conversation - 1) // PAGE * PAGE
    assert second.headers["x-pdserve-prefill-cached"].startswith(f"device=0, host=0, pool={kept}, ")
    assert found(second)["pool"] == wanted_hits(prompts[1])

    for turn, answer in zip(TURNS, (first, second), strict=True):
        expected = real.cold(turn)
        assert choice(answer)["message"]["content"] == expected["message"]["content"]
        assert logprobs(choice(answer)) == pytest.approx(logprobs(expected), abs=LOGPROB_TOLERANCE)


def test_answers_to_a_long_text_equal_plain_sglang(real: Real) -> None:
    """Prompts that end within the text, on, just below and just above the bounds of pages."""
    text = real.tokenizer.encode((ROOT / "README.md").read_text(), add_special_tokens=False)
    prompts = [text[:length] for length in (63, 64, 65, 450)]
    expected = ask_cold(real.plain, prompts)
    answers, cached = ask(real.router, prompts)
    assert differences(expected, answers, say(prompts)) == []
    assert cached == [*map(wanted_hits, prompts)]


def test_a_wrong_page_shows_in_the_words(real: Real) -> None:
    """Checksums are off here, so the page with the question about France is delivered as it is."""
    prompt = real.tokens(TURNS[1])
    asked = prompt.index(real.tokenizer.encode(" France")[0])
    chat(real.router.url, TURNS[1])
    offset = page_offset(
        real.pool, *real.decode.namespace, page_hashes(prompt, PAGE)[asked // PAGE], SEGMENTS
    )
    flip(real.pool.arena, offset, sum(SEGMENTS))
    real.flush()
    wrong = chat(real.decode.url, TURNS[1])
    flip(real.pool.arena, offset, sum(SEGMENTS))
    real.flush()
    right = chat(real.decode.url, TURNS[1])
    assert "Rome" not in choice(wrong)["message"]["content"]
    assert choice(right)["message"]["content"] == "The capital of Italy is Rome."
    assert [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (wrong, right)] == (
        [wanted_hits(prompt)] * 2
    )
