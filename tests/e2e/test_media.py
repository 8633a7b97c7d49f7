"""Prompts with images: a prefill worker computes them, and the decode worker finds their pages in the pool.

SGLang names the tokens of an image by a hash of its pixels. Workers make that hash before they ask their
scheduler, so they can name the pages, and wait for them.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.e2e.cluster import PoolNode, Router, Worker, http, started
from tests.support.e2e.prompts import PAGE
from tests.support.e2e.routed import found
from tests.support.e2e.site import engine_settings
from tests.support.e2e.vision_model import TOKEN_PIXELS, make_vision_model

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

SIDE = 12
"""Tokens of an image's side: each image has 144 tokens, which are more than two pages."""


@dataclass
class Seeing:
    """A pair of workers."""

    prefill: Worker
    decode: Worker
    router: Router


@pytest.fixture(scope="module")
def seeing(model: Path, run_dir: Path) -> Iterator[Seeing]:
    engine = engine_settings(make_vision_model(model, run_dir / "demo-vision"), max_total_tokens=12_000)
    pool = PoolNode(run_dir, "mediapool")
    pages = {"nodes": [pool.ref]}
    prefill = Worker("prefill", "media-prefill", run_dir, engine, pages)
    decode = Worker("decode", "media-decode", run_dir, engine, pages)
    with (
        started(pool, prefill, decode),
        Router(run_dir, [prefill], [decode], name="media-router") as router,
    ):
        yield Seeing(prefill, decode, router)


def picture(seed: int) -> dict[str, Any]:
    """A part of a message: noise."""
    noise = random.Random(seed).randbytes(3 * (SIDE * TOKEN_PIXELS) ** 2)
    image = Image.frombytes("RGB", (SIDE * TOKEN_PIXELS,) * 2, noise)
    data = io.BytesIO()
    image.save(data, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"},
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(url: str, parts: list[dict[str, Any]], **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": parts}]
    body = {"model": "demo-tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    answer = http.post(f"{url}/v1/chat/completions", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    return answer


def cold(worker: Worker, parts: list[dict[str, Any]]) -> str:
    """What the worker answers that finds no page: those with this salt were never asked for."""
    response = ask(worker.url, parts, cache_salt="cold")
    details = response.json()["usage"]["prompt_tokens_details"] or {}
    assert details.get("cached_tokens", 0) == 0
    return answer_of(response)


def answer_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.model_support("multimodal", "disaggregated")
@pytest.mark.model_support("multimodal", "pool")
def test_images_are_computed_once_and_answers_are_those_of_a_worker_that_computes_all(seeing: Seeing) -> None:
    questions = [
        [text("What is this? "), picture(1)],
        [picture(2), text(" Describe it, please. " * 10)],
        [text("One "), picture(3), text(" and two "), picture(4), text(" which is older?")],
    ]
    for parts in questions:
        response = ask(seeing.router.url, parts)
        assert answer_of(response) == cold(seeing.decode, parts)
        assert "prefill=media" not in response.headers["x-pdserve-plan"]
        tokens = response.json()["usage"]["prompt_tokens"]
        assert tokens > SIDE**2
        assert found(response)["pool"] == (tokens - 1) // PAGE * PAGE


def test_a_prefill_waits_for_the_pages_of_images(seeing: Seeing) -> None:
    messages = [{"role": "user", "content": [picture(5), text("What is this?")]}]
    body = {"model": "demo-tiny", "messages": messages, "max_tokens": 8}
    url = f"{seeing.prefill.url}/pd/prefill?endpoint=/v1/chat/completions"
    report = http.post(url, json=body, timeout=60.0).json()
    assert (report["published_pages"], report["missing_pages"]) == (report["prompt_tokens"] // PAGE, 0)
    assert report["published_pages"] >= SIDE**2 // PAGE


def test_another_image_between_the_same_words_is_not_taken_for_it(seeing: Seeing) -> None:
    words = text("Same words after the image, whatever it shows.")
    one, other = (ask(seeing.router.url, [picture(seed), words]) for seed in (6, 7))
    assert answer_of(other) == cold(seeing.decode, [picture(7), words])
    assert other.headers["x-pdserve-prefill-cached"].startswith("device=0, host=0, pool=0")
    assert answer_of(one) != answer_of(other)
