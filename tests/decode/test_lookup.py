"""How much of a prompt the pool has: against a scripted pool and SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.decode import lookup as module
from pdserve.decode.lookup import Lookup
from pdserve.engine.page_names import PageNames
from pdserve.pages import PagePart, page_hashes, part_suffix, pool_key
from tests.support.engine.pool import MEMORY, PAGE, PROMPT, SSD, SUFFIXES, Engine, Pool, post

WINDOWS = PagePart("swa", 1, [part_suffix(suffix, "swa", {"kv": 0, "swa": 1}) for suffix in SUFFIXES])


async def ask(
    pool: Pool, body: Any, parts: Sequence[PagePart] = (), salt: str | None = None
) -> tuple[int, dict[str, Any]]:
    names = PageNames(PAGE, SUFFIXES, parts)
    return await post(Lookup(Engine(), pool, names=names).lookup, body, salt)  # type: ignore[arg-type]


async def test_the_longest_prefix_is_told_by_tier() -> None:
    pool = Pool()
    pool.has(MEMORY, MEMORY, SSD, MEMORY)
    status, said = await ask(pool, {"input_ids": PROMPT})
    assert status == 200
    assert said == {
        "page_tokens": 4,
        "prompt_tokens": 18,
        "prompt_pages": 4,
        "tokens": 16,
        "memory_tokens": 8,
        "tiers": {"dram": 3, "ssd": 1},
    }
    _, said = await ask(pool, {"text": " ".join(map(str, PROMPT))})
    assert said["tokens"] == 16


async def test_a_prefix_ends_where_one_rank_lacks_a_page_and_where_its_windows_are_too() -> None:
    pool = Pool()
    pool.has(MEMORY, MEMORY, MEMORY)
    pool.has(MEMORY, MEMORY, suffixes=WINDOWS.suffixes)
    _, said = await ask(pool, {"input_ids": PROMPT}, parts=[WINDOWS])
    assert said["tokens"] == 8
    del pool.there[pool_key(page_hashes(PROMPT, PAGE)[1], SUFFIXES[1])]
    _, said = await ask(pool, {"input_ids": PROMPT})
    assert (said["tokens"], said["tiers"]) == (4, {"dram": 1})


async def test_who_asks_with_a_salt_hears_of_its_own_pages_only() -> None:
    pool = Pool()
    pool.has(MEMORY, salt="tenant/alice")
    for salt, tokens in (("tenant/alice", 4), ("tenant/bob", 0), (None, 0)):
        _, said = await ask(pool, {"input_ids": PROMPT}, salt=salt)
        assert said["tokens"] == tokens
    # the body's own salt does not replace that of the router
    _, said = await ask(pool, {"input_ids": PROMPT, "cache_salt": "tenant/alice"}, salt="tenant/bob")
    assert said["tokens"] == 0


async def test_pages_are_asked_for_by_name() -> None:
    pool = Pool()
    pool.has(MEMORY, MEMORY)
    status, said = await ask(pool, {"hashes": [page.hex() for page in page_hashes(PROMPT, PAGE)]})
    assert (status, said["tokens"], said["prompt_tokens"], said["prompt_pages"]) == (200, 8, 0, 4)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"input_ids": null}',
        b"\xff",
        b"[" * 100_000,
        {"input_ids": PROMPT, "hashes": []},
        {"input_ids": PROMPT, "messages": []},
        {"input_ids": []},
        {"input_ids": [[1], [2]]},
        {"input_ids": PROMPT, "image_data": "x"},
        {"input_ids": PROMPT, "lora_path": "x"},
        {"input_ids": ["x"]},
        {"hashes": ["zz"]},
        {"hashes": ["00"]},
        {"hashes": [1]},
        {"hashes": ["00" * 32] * (module.MAX_PAGES + 1)},
    ],
)
async def test_what_names_no_prompt_is_refused(body: Any) -> None:
    status, said = await ask(Pool(), body)
    assert status == 400
    assert said["error"]["message"]


async def test_a_prompt_without_a_whole_page_has_nothing() -> None:
    status, said = await ask(Pool(), {"input_ids": [1]})
    assert (status, said["prompt_pages"], said["tokens"], said["tiers"]) == (200, 0, 0, {})
