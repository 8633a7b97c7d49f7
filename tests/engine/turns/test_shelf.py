"""Records in a real pool node: there for another worker, bounded in time, gone with the node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.turns import record
from pdserve.engine.turns.shelf import LateError, Shelf
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.security.tokens import Secret
from tests.support.engine.turns import OPENING, SmallTokenizer, Worker, asked, end, letters, said
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import small_config

GEOMETRY = {"model": "m"}
KEYS = [bytes([number]) * 32 for number in range(4)]
SOON_S = 2.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    started = LocalNode(small_config(), tmp_path)
    yield started
    started.close()


def pages_of(node: LocalNode, namespace: str = "pages", page_key: str = "") -> Any:
    config = PoolClientConfig(
        nodes=[PoolNodeRef(node=node.config.name, address=node.address)], page_key=Secret(page_key)
    )
    return SimpleNamespace(config=config, namespace=namespace, geometry=GEOMETRY)


async def stored(shelf: Shelf, key: bytes, ids: list[int]) -> None:
    writing = shelf.write(key, ids)
    assert writing is not None
    assert await writing


@pytest.mark.parametrize("page_key", ["", "a-key-of-these-workers"], ids=["no key", "page key"])
async def test_another_worker_reads_what_one_wrote(node: LocalNode, page_key: str) -> None:
    one, other = (Shelf(pages_of(node, page_key=page_key), SOON_S) for _ in range(2))
    long = list(range(record.FIRST_TOKENS + 10))
    await stored(one, KEYS[0], [1, 2, 3])
    await stored(one, KEYS[1], long)
    assert await other.read(KEYS) == {KEYS[0]: [1, 2, 3], KEYS[1]: long}
    assert await other.read([]) == {}
    one.close()
    other.close()


async def test_a_record_that_lacks_a_page_is_not_there(node: LocalNode) -> None:
    """Its first page alone says nothing."""
    shelf = Shelf(pages_of(node), SOON_S)
    await stored(shelf, KEYS[0], [1] * (record.FIRST_TOKENS + 10))
    second = record.page_keys(KEYS[0], 2)[1]
    await stored(shelf, KEYS[1], [5])
    first, _ = record.to_pages([1] * (record.FIRST_TOKENS + 10))
    with contextlib.closing(PoolClient(pages_of(node).config, "pages", GEOMETRY)) as client:
        assert client.put([KEYS[2]], [[first]]) == [True]
    found = await shelf.read([KEYS[0], KEYS[1], KEYS[2], second])
    assert set(found) == {KEYS[0], KEYS[1]}
    shelf.close()


async def test_a_pool_that_is_away_has_no_records(node: LocalNode) -> None:
    shelf = Shelf(pages_of(node), 0.2)
    node.kill()
    async with asyncio.timeout(60):  # against a hang
        for _ in range(3):
            with contextlib.suppress(LateError):
                assert await shelf.read(KEYS) == {}
        writing = shelf.write(KEYS[0], [1])
        assert writing is not None
        assert not await writing
    node.restart()
    shelf.close()


async def test_work_that_waits_is_bounded(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until what was begun is done."""
    monkeypatch.setattr("pdserve.engine.turns.shelf._MAX_QUEUED", 0)
    shelf = Shelf(pages_of(node), SOON_S)
    assert shelf.write(KEYS[0], [1]) is None
    with pytest.raises(LateError):
        await shelf.read(KEYS)
    shelf.close()


async def test_an_answer_that_is_too_long_is_not_stored(node: LocalNode) -> None:
    shelf = Shelf(pages_of(node), SOON_S)
    assert shelf.write(KEYS[0], [1] * (record.MAX_TOKENS + 1)) is None
    assert shelf.write(KEYS[0], []) is None
    shelf.close()
    assert shelf.write(KEYS[0], [1]) is None  # and nothing once it is closed


async def test_a_restarted_worker_goes_on_from_the_pools_records(node: LocalNode) -> None:
    text = said("user", "Hi") + OPENING
    answer = letters("Hello")
    shelf = Shelf(pages_of(node), SOON_S)
    before = Worker(shelf)  # type: ignore[arg-type]
    turn = await before.turns.prompt(asked(text, 0))
    assert turn is not None
    writing = await before.turns.answer(turn, [*turn.ids, *answer, end()])
    assert writing is not None
    assert await writing.done
    shelf.close()
    shelf = Shelf(pages_of(node), SOON_S)
    after = Worker(shelf)  # type: ignore[arg-type]
    following = text + "Hello" + SmallTokenizer().stop_tokens.texts[end()] + OPENING
    ids = await after.answers(asked(following, 1), [])
    assert ids[: len(turn.ids) + len(answer)] == [*turn.ids, *answer]
    assert after.outcomes == ["spliced"]
    shelf.close()
