"""Two prompts through a running cluster, by its router: is the second found again?"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Iterable
from typing import Annotated, Final

import httpx
import msgspec
from msgspec import Meta

from pdserve.doctor.cluster import Asker, NoAnswer
from pdserve.doctor.facts import Probe, Turn, Worker
from pdserve.router.request.reports import CACHED_HEADER, PREFILL_CACHED_HEADER, parse_cached
from pdserve.security.log_text import printable

PAGES: Final = 4
MAX_PAGE_TOKENS: Final = 65_536
TIMEOUT_S: Final = 120.0
MAX_TOKENS: Final = 1 << 30
LEAST_TOKEN, LAST_TOKEN = 200, 1200  # ids that every vocabulary has, none of them special
SAID_CHARS: Final = 300


class _Meta(msgspec.Struct):
    prompt_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[Annotated[int, Meta(ge=0, le=MAX_TOKENS)]] = []


def page_sizes(workers: Iterable[Worker]) -> dict[str, int]:
    """Of each model that ready workers generate with; the largest where they differ."""
    sizes: dict[str, int] = {}
    for worker in workers:
        info = worker.info
        if info is None or not worker.ready or info.lacks or "generate" not in info.tasks:
            continue
        if 0 < info.page_size <= MAX_PAGE_TOKENS:
            sizes[info.model] = max(int(info.page_size), sizes.get(info.model, 0))
    return sizes


def probe(
    router_url: str,
    model: str,
    page_size: int,
    key: str,
    dice: random.Random,
    trust: ssl.SSLContext | None = None,
) -> Probe:
    """Ask the router for a prompt of random tokens and then for the conversation's next turn."""
    prompt = [dice.randrange(LEAST_TOKEN, LAST_TOKEN) for _ in range(PAGES * page_size + 7)]
    session = f"pdserve-doctor-{dice.getrandbits(64):x}"
    asker = Asker(key, trust)
    turns: list[Turn] = []
    for _ in range(2):
        body = {
            "model": model,
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": page_size, "ignore_eos": True},
        }
        started_s = time.monotonic()
        try:
            answer = asker.post(f"{router_url}/generate", body, {"x-session-id": session}, TIMEOUT_S)
            if answer.status != 200:
                said = printable(answer.body.decode("utf-8", "replace"), SAID_CHARS)
                raise NoAnswer(f"status {answer.status}: {said}")
            generated = answer.decoded(_Generated)
        except NoAnswer as error:
            text = f"the router did not answer a prompt of {len(prompt)} tokens for {model}: {error}"
            return Probe(model=model, error=text)
        turns.append(_turn(generated.meta_info, answer.headers, time.monotonic() - started_s))
        more = [dice.randrange(LEAST_TOKEN, LAST_TOKEN) for _ in range(7)]
        prompt = [*prompt, *generated.output_ids[:page_size], *more]
    return Probe(model=model, page_size=page_size, turns=tuple(turns))


def _turn(meta: _Meta, headers: httpx.Headers, seconds: float) -> Turn:
    prefill = headers.get(PREFILL_CACHED_HEADER.decode())
    return Turn(
        prompt_tokens=meta.prompt_tokens,
        prefill=None if prefill is None else parse_cached(prefill),
        decode=parse_cached(headers.get(CACHED_HEADER.decode(), "")),
        plan=headers.get("x-pdserve-plan", ""),
        seconds=seconds,
    )
