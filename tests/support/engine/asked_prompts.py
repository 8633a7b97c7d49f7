"""One prompt, a pool that has pages of it, and an SGLang that makes its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from pdserve.kvpool.client.async_client import Place
from pdserve.pages import namespace_seed, page_hashes, pool_key

PAGE = 4
SUFFIXES = (b"-0", b"-1")
PROMPT = list(range(100, 118))  # 4 pages and two tokens
MEMORY, SSD, OTHER = Place("a", "dram"), Place("a", "ssd"), Place("b", "dram")


class Pool:
    """Pages by key."""

    def __init__(self) -> None:
        self.there: dict[bytes, Place] = {}

    def has(self, *places: Place, salt: str | None = None, suffixes: Sequence[bytes] = SUFFIXES) -> None:
        pages = page_hashes(PROMPT, PAGE, namespace_seed(None, salt))
        for page, place in zip(pages, places, strict=False):
            self.there |= {pool_key(page, suffix): place for suffix in suffixes}

    async def places(self, keys: Sequence[bytes], tenant: str = "") -> list[Place | None]:
        return [self.there.get(key) for key in keys]


class Engine:
    """SGLang, whose tokens are the numbers in a text."""

    def __init__(self) -> None:
        self.tokenizer_manager = self
        self.server_args = SimpleNamespace(dp_size=2)
        self.app_state = self.turns = None

    async def _tokenize_texts(self, text: str) -> tuple[list[int], None]:
        return list(map(int, text.split())), None
