"""Names of the pool pages of a request, and how many of them the pool has.

A request's chain is hashed once, beside the worker's event loop where it is long.

SGLang stores the pages of a sequence in order, one batch after the other. So when the last full page of a
sequence (its end) is committed, every page of it that will be stored is. Where pages have parts beside KV,
the end includes the parts that are needed to restore the sequence: those of the last pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Final, Protocol

from msgspec.structs import replace

from pdserve.engine.http.request import EngineRequest, HttpRequest
from pdserve.kvpool.namespaces.tenants import tenant_of
from pdserve.pages import (
    KV,
    PagePart,
    namespace_seed,
    page_hashes,
    pool_key,
    restorable_lengths,
)

HASHED_AT_ONCE_TOKENS: Final = 4096
"""1 to 3 ms of hashing. More is left to a thread."""
ASKED_KEYS: Final = 256
"""A request of so many pages at most, over all ranks, is asked for in full."""
SAMPLED_PAGES: Final = 64


@dataclass(frozen=True)
class Prefix:
    """A prefix of a prompt, of whole pages: pool keys at all ranks, of its last page, and of the windows that
    are needed to restore it.
    """

    last_page: tuple[bytes, ...]
    windows: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class PageNames:
    """`rank_suffixes` as in `pages.all_rank_suffixes`. `parts`: those beside KV. `pairs`: as in
    `pages.page_hashes`.
    """

    page_size: int  # tokens
    rank_suffixes: Sequence[bytes]
    parts: Sequence[PagePart] = ()
    pairs: bool = False

    @property
    def tokens_after(self) -> int:
        """A page can be looked up once so many tokens follow it. SGLang never looks up a prompt's last."""
        return 1 + self.pairs

    def looked_up(self, prompt_tokens: int) -> int:
        """How many pages SGLang looks for of a prompt of so many tokens."""
        return max(0, prompt_tokens - self.tokens_after) // self.page_size

    def none(self) -> RequestPages:
        """No pages."""
        return RequestPages(self, {})

    async def of_prompts(self, request: HttpRequest) -> RequestPages:
        """The full pages of every prompt of the request."""
        return await self._pages(request, _prompt)

    async def of_conversations(self, request: HttpRequest) -> RequestPages:
        """The full pages of every prompt of the request with its output."""
        return await self._pages(request, lambda made: made.conversation())

    def unnamed(self, request: HttpRequest, prompt_tokens: int) -> int:
        """How many pages of the request's prompts, `prompt_tokens` in all, cannot be named: those of some
        models' media.
        """
        named_tokens = sum(len(_prompt(made)) for made in request.requests.values())
        return max(0, prompt_tokens - named_tokens) // self.page_size * len(self.rank_suffixes)

    def of_prefixes(
        self, tokens: Sequence[int], ends: Sequence[int], extra_key: str | None, cache_salt: str | None
    ) -> list[Prefix]:
        """Prefixes of a prompt. `ends`: their lengths in tokens, whole pages, ascending."""
        seed = namespace_seed(extra_key, cache_salt)
        pages = page_hashes(tokens[: ends[-1] + self.pairs], self.page_size, seed, pairs=self.pairs)
        chains = [pages[: end // self.page_size] for end in ends]
        return [
            Prefix(
                tuple(page_keys(chain[-1:], self.rank_suffixes, self.parts)),
                tuple(window_keys(chain, self.parts)),
            )
            for chain in chains
        ]

    async def _pages(
        self, request: HttpRequest, tokens: Callable[[EngineRequest], Sequence[int]]
    ) -> RequestPages:
        sequences = [
            (made.rid, tokens(made), namespace_seed(made.extra_key, made.cache_salt))
            for made in request.requests.values()
        ]
        # of one HTTP request all salts are of one tenant: the router says them
        tenant = next((tenant_of(made.cache_salt) for made in request.requests.values()), "")

        def hashed() -> RequestPages:
            chains = {
                rid: page_hashes(ids, self.page_size, seed, pairs=self.pairs) for rid, ids, seed in sequences
            }
            return RequestPages(self, chains, tenant)

        if sum(len(ids) for _, ids, _ in sequences) <= HASHED_AT_ONCE_TOKENS:
            return hashed()
        return await asyncio.to_thread(hashed)


@dataclass(frozen=True)
class RequestPages:
    """The full pages of a request's sequences: a chain of digests for each, by SGLang's request id."""

    names: PageNames
    chains: Mapping[str, Sequence[bytes]]
    tenant: str = ""
    """Whose pages they are; empty: nobody's."""

    @property
    def parts(self) -> Sequence[PagePart]:
        """Those beside KV."""
        return self.names.parts

    def __len__(self) -> int:
        """Pages at all ranks, without repetition. A page counts once, whatever its parts."""
        return len(self._distinct) * len(self.names.rank_suffixes)

    def all_keys(self) -> list[bytes]:
        """Pool keys of all parts of all pages."""
        windows = [
            replace(part, window_pages=len(self._distinct)) for part in self.parts if part.window_pages
        ]
        return [*self._keys(self._distinct), *window_keys(self._distinct, windows)]

    def keys_behind(self, tokens: int) -> list[bytes]:
        """Pool keys of all parts of the pages that no sequence has among its first `tokens`."""
        pages = tokens // self.names.page_size
        first = {digest for chain in self.chains.values() for digest in chain[:pages]}
        rest = {"": [digest for digest in self._distinct if digest not in first]}
        return RequestPages(self.names, rest, self.tenant).all_keys()

    def ends(self) -> list[bytes]:
        """Pool keys of the last page of every sequence, with the parts that the sequence needs."""
        return self._end_keys(self._ends)

    def arrived(self, committed: Sequence[bool]) -> bool:
        """Whether pages arrive at the pool at all, from which of `ends` did. An end without its windows is of
        no use.
        """
        return all(committed) if self.parts else any(committed)

    def restorable(self, present: Collection[bytes]) -> int:
        """How many pages, at all ranks, are in prefixes that can be restored where the pool has these."""
        kv = PagePart(KV, 0, self.names.rank_suffixes)
        found: set[bytes] = set()
        for chain in self.chains.values():
            there = [
                (part.window_pages, [all(pool_key(d, s) in present for s in part.suffixes) for d in chain])
                for part in (kv, *self.parts)
            ]
            found.update(chain[: max(restorable_lengths(there), default=0)])
        return len(found) * len(self.names.rank_suffixes)

    def ends_found(self, prompt_tokens: Mapping[str, int], cached_tokens: Mapping[str, int]) -> list[bytes]:
        """Those of `ends` that SGLang may have had in its cache. Both arguments: SGLang's counts, by its
        request id.

        SGLang looks for all of a prompt but the last token, and computes the last page of a prompt of whole
        pages in any case. So where it found all that it looks for, that page counts as found too.
        """
        found: set[bytes] = set()
        for rid, chain in self.chains.items():
            pages = cached_tokens.get(rid, 0) // self.names.page_size
            is_all = pages == self.names.looked_up(prompt_tokens.get(rid, 0))
            found.update(chain if is_all else chain[:pages])
        return self._end_keys([end for end in self._ends if end in found])

    def missed(
        self, prompt_tokens: Mapping[str, int], cached_tokens: Mapping[str, int]
    ) -> list[tuple[bytes, int]]:
        """The first full page of each prompt that SGLang did not find: its pool key at the first rank, and
        the tokens of full pages from there on. Arguments as in `ends_found`. Chains may go on with the
        output.
        """
        missed = []
        for rid, tokens in prompt_tokens.items():
            page_size, looked_for = self.names.page_size, self.names.looked_up(tokens)
            found, chain = cached_tokens.get(rid, 0) // page_size, self.chains.get(rid, ())
            if found < looked_for <= len(chain):
                key = pool_key(chain[found], self.names.rank_suffixes[0])
                missed.append((key, (looked_for - found) * page_size))
        return missed

    def sample(self) -> list[bytes]:
        """Pool keys of `SAMPLED_PAGES` pages at equal distances. All pages, if they are not many more."""
        if len(self) <= ASKED_KEYS:
            return self._keys(self._distinct)
        step = -(-len(self._distinct) // SAMPLED_PAGES)
        suffixes = self.names.rank_suffixes
        return [
            pool_key(digest, suffixes[place % len(suffixes)])
            for place, digest in enumerate(self._distinct[::step])
        ]

    @cached_property
    def _distinct(self) -> list[bytes]:
        return list(dict.fromkeys(digest for chain in self.chains.values() for digest in chain))

    @cached_property
    def _ends(self) -> dict[bytes, Sequence[bytes]]:
        """The chains of all sequences by their last digest."""
        return {chain[-1]: chain for chain in self.chains.values() if chain}

    def _end_keys(self, ends: Iterable[bytes]) -> list[bytes]:
        keys = self._keys(ends)
        for end in ends:
            keys += window_keys(self._ends[end], self.parts)
        return list(dict.fromkeys(keys))

    def _keys(self, digests: Iterable[bytes]) -> list[bytes]:
        return page_keys(digests, self.names.rank_suffixes, self.parts)


def window_keys(chain: Sequence[bytes], parts: Sequence[PagePart]) -> list[bytes]:
    """Pool keys, at all ranks, of the parts that only the last pages of a sequence need."""
    return [
        pool_key(digest, suffix)
        for part in parts
        if part.window_pages
        for digest in chain[-part.window_pages :]
        for suffix in part.suffixes
    ]


def page_keys(
    digests: Iterable[bytes], rank_suffixes: Sequence[bytes], parts: Sequence[PagePart]
) -> list[bytes]:
    """Pool keys, at all ranks, of the parts that all pages have: KV and perhaps more."""
    suffixes = [*rank_suffixes, *(s for part in parts if not part.window_pages for s in part.suffixes)]
    return [pool_key(digest, suffix) for digest in digests for suffix in suffixes]


class Pool(Protocol):
    """What is asked here of an `AsyncPoolClient`."""

    async def exists(self, keys: Sequence[bytes], tenant: str) -> list[bool]: ...


async def committed_pages(pool: Pool, pages: RequestPages) -> int:
    """How many of the pages are in the pool. Where pages have parts, only those of prefixes that can be
    restored count.

    Of a long request the ends and a sample are asked for, and all only where one of these is missing. So a
    single page that the pool lost since it was stored may be counted. A lost node is seen, by its share of
    all pages. Eight ranks have 16,384 keys of 128k tokens at 64 a page: too many to ask after each request.
    """
    if not pages:
        return 0
    asked = pages.sample()
    if pages.parts or len(asked) < len(pages):
        if all(await pool.exists([*pages.ends(), *asked], pages.tenant)):
            return len(pages)
        asked = await asyncio.to_thread(pages.all_keys)
    there = await pool.exists(asked, pages.tenant)
    if not pages.parts:
        return sum(there)
    return await asyncio.to_thread(pages.restorable, set(compress(asked, there)))


def _prompt(made: EngineRequest) -> Sequence[int]:
    return made.input_ids or []
