"""Names of the pool pages of a request. Pure.

SGLang stores the pages of a sequence in order, one batch after the other. So when the last full page of a
sequence (its end) is committed, every page of it that will be stored is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.engine.http.request import EngineRequest, HttpRequest
from pdserve.pages import namespace_seed, page_hashes, pool_key


@dataclass(frozen=True)
class PageNames:
    """`rank_suffixes` as in `pages.all_rank_suffixes`."""

    page_size: int  # tokens
    rank_suffixes: Sequence[bytes]

    def of_prompts(self, request: HttpRequest) -> list[bytes]:
        """Pool keys of every full page of every prompt of the request, without repetition."""
        return self._keys(self._chains(request, _prompt))

    def of_conversations(self, request: HttpRequest) -> list[bytes]:
        """The same, of prompt and output."""
        return self._keys(self._chains(request, lambda made: made.conversation()))

    def ends_of_prompts(self, request: HttpRequest) -> list[bytes]:
        """Pool keys of the last full page of every prompt."""
        return self._keys(chain[-1:] for chain in self._chains(request, _prompt))

    def ends_of_conversations(self, request: HttpRequest) -> list[bytes]:
        """The same, of prompt and output."""
        return self._keys(chain[-1:] for chain in self._chains(request, lambda made: made.conversation()))

    def found_of_prompts(self, request: HttpRequest, cached_tokens: Mapping[str, int]) -> list[bytes]:
        """Pool keys of the prompts' pages that SGLang may have had in its cache. `cached_tokens`: its count,
        by its request id.

        SGLang looks for all of a prompt but the last token, and computes the last page of a prompt of whole
        pages in any case. So where it found all that it looks for, that page counts as found too.
        """

        def found(made: EngineRequest) -> Sequence[int]:
            prompt, cached = _prompt(made), cached_tokens.get(made.rid, 0)
            is_all = cached // self.page_size == (len(prompt) - 1) // self.page_size
            return prompt if is_all else prompt[:cached]

        return self._keys(self._chains(request, found))

    def unnamed(self, request: HttpRequest, prompt_tokens: int) -> int:
        """How many pages of the request's prompts, `prompt_tokens` in all, cannot be named: those of images
        and the like.
        """
        named_tokens = sum(len(_prompt(made)) for made in request.requests.values())
        return max(0, prompt_tokens - named_tokens) // self.page_size * len(self.rank_suffixes)

    def of_prefixes(
        self, tokens: Sequence[int], ends: Sequence[int], extra_key: str | None, cache_salt: str | None
    ) -> list[tuple[bytes, ...]]:
        """Pool keys of the last page, at every rank, of each prefix of a prompt. `ends`: the prefixes'
        lengths in tokens, whole pages, ascending.
        """
        pages = page_hashes(tokens[: ends[-1]], self.page_size, namespace_seed(extra_key, cache_salt))
        return [
            tuple(pool_key(pages[end // self.page_size - 1], suffix) for suffix in self.rank_suffixes)
            for end in ends
        ]

    def _chains(
        self, request: HttpRequest, tokens: Callable[[EngineRequest], Sequence[int]]
    ) -> Iterator[list[bytes]]:
        for made in request.requests.values():
            yield page_hashes(tokens(made), self.page_size, namespace_seed(made.extra_key, made.cache_salt))

    def _keys(self, chains: Iterable[list[bytes]]) -> list[bytes]:
        hashes = dict.fromkeys(digest for chain in chains for digest in chain)
        return [pool_key(digest, suffix) for digest in hashes for suffix in self.rank_suffixes]


def _prompt(made: EngineRequest) -> Sequence[int]:
    return made.input_ids or []
