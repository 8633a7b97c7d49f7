"""What exact turns do to one prompt and to one answer.

    prompt   cut; records of its answers from memory, else from the pool; each is checked; tokens put in
    answer   recorded in memory at once and in the pool in the background

Two workers that serve one request must use the same tokens, or the second would not find the first one's
pages. So the prefill worker's choice travels: a bit for each segment that it gave recorded tokens. The decode
worker takes the records of these segments and no others.

Nothing here fails a request: whatever goes wrong, the text is encoded as ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from pdserve.engine.turns.record import Memory, page_keys, pages_of
from pdserve.engine.turns.segments import Prompt, StopTokens, cut, scope_of
from pdserve.engine.turns.shelf import LateError
from pdserve.kvpool.namespaces.tenants import tenant_of

logger = logging.getLogger(__name__)

AT_ONCE_CHARS: Final = 64 * 1024
"""About 1 ms of cutting and hashing. More is left to a thread."""
AT_ONCE_TOKENS: Final = 2048
"""About 1 ms of decoding."""


class Tokenizer(Protocol):
    """What is asked of the model's tokenizer."""

    stop_tokens: StopTokens
    fingerprint: str
    vocabulary: int

    def decode(self, ids: Sequence[int]) -> str:
        """The text with special tokens; nothing is cleaned up."""


class Stored(NamedTuple):
    """A record that is being stored in the pool, and its keys there."""

    done: asyncio.Future[bool]
    keys: list[bytes]


class Records(Protocol):
    """The records in the pool (`shelf.Shelf`)."""

    async def read(self, keys: Sequence[bytes], tenant: str) -> Mapping[bytes, list[int]]:
        """Raises LateError."""

    def write(self, key: bytes, ids: Sequence[int], tenant: str) -> asyncio.Future[bool] | None: ...


@dataclass(frozen=True)
class Asked:
    """A rendered prompt that is to be computed."""

    text: str
    ids: Sequence[int]
    answers: int  # messages of the assistant in it
    adapter: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    most_tokens: int = 1 << 62
    """A prompt may become so long by recorded tokens, and no longer."""


@dataclass(frozen=True)
class Turn:
    """One prompt with the tokens that it gets."""

    prompt: Prompt
    ids: list[int]
    replaced: int = 0
    """A bit for each segment with recorded tokens."""
    outcome: str = ""
    """A word for the metrics; empty: there was no answer to look for."""
    tenant: str = ""
    """Whose conversation it is; empty: nobody's."""


class ExactTurns:
    """Of one worker. `records`: None without a pool. `count`: called with the outcome of each later turn."""

    def __init__(
        self, tokenizer: Tokenizer, memory: Memory, records: Records | None, count: Callable[[str], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._memory = memory
        self._records = records
        self._count = count

    async def prompt(
        self, asked: Asked, wanted: int | None = None, *, is_counted: bool = True
    ) -> Turn | None:
        """The tokens for a prompt. `wanted`: the segments for which another worker took recorded tokens.
        `is_counted`: it is computed now. None: the prompt cannot be cut, so it stays as it is and its
        answer is not recorded.
        """
        scope = scope_of(self._tokenizer.fingerprint, asked.adapter, asked.extra_key, asked.cache_salt)
        tokens = self._tokenizer.stop_tokens
        if len(asked.text) <= AT_ONCE_CHARS:
            prompt = cut(asked.text, asked.ids, tokens, scope)
        else:
            prompt = await asyncio.to_thread(cut, asked.text, asked.ids, tokens, scope)
        tenant = tenant_of(asked.cache_salt)
        turn = None if prompt is None else Turn(prompt, list(asked.ids), tenant=tenant)
        if turn is not None and asked.answers:
            turn = replace(await self._spliced(turn, asked, wanted), tenant=tenant)
        outcome = "not_cut" if turn is None else turn.outcome
        if is_counted and asked.answers and outcome:
            self._count(outcome)
        return turn

    async def answer(self, turn: Turn, whole: Sequence[int]) -> Stored | None:
        """Record the answer to a prompt. `whole`: the tokens of prompt and answer. None: it is not stored in
        the pool.
        """
        prompt, decode, stops = turn.prompt, self._tokenizer.decode, self._tokenizer.stop_tokens.texts
        start = len(turn.ids) - len(prompt.ids[-1])
        if list(whole[:start]) != turn.ids[:start]:
            return None  # SGLang computed another prompt, a shortened one for example
        end = next((place for place in range(start, len(whole)) if whole[place] in stops), len(whole))
        ids = whole[start:end]
        if len(ids) <= AT_ONCE_TOKENS:
            key = prompt.answered(ids, decode)
        else:
            key = await asyncio.to_thread(prompt.answered, ids, decode)
        if key is None:
            return None
        self._memory.put(key, ids)
        storing = None if self._records is None else self._records.write(key, ids, turn.tenant)
        return None if storing is None else Stored(storing, page_keys(key, pages_of(len(ids))))

    async def _spliced(self, turn: Turn, asked: Asked, wanted: int | None) -> Turn:
        prompt = turn.prompt
        if wanted is None:
            numbers = prompt.candidates(asked.answers)
        else:
            numbers = [number for number in range(len(prompt.keys)) if wanted >> number & 1]
        found, problem = await self._found(prompt, numbers, turn.tenant)
        ids = prompt.with_ids(found)
        other = [number for number, one in found.items() if list(one) != list(prompt.ids[number])]
        if wanted is not None and len(found) < len(numbers):
            problem = problem or "lost"
        if not other:
            outcome = problem or ("same" if found else "unknown" if numbers else "")
            return Turn(prompt, turn.ids, 0, outcome)
        if len(ids) > max(len(asked.ids), asked.most_tokens):
            return Turn(prompt, turn.ids, 0, "too_long")
        # only those that differ are told: for the others the next worker needs no record
        outcome = "lost" if problem == "lost" else "spliced"
        return Turn(prompt, ids, sum(1 << number for number in other), outcome)

    async def _found(
        self, prompt: Prompt, numbers: Sequence[int], tenant: str
    ) -> tuple[dict[int, Sequence[int]], str]:
        """Recorded tokens that make their segment's text, and what was wrong where some are not there."""
        found, unknown, problem = {}, [], ""
        for number in numbers:
            at_hand = self._memory.get(prompt.keys[number])
            if at_hand is None:
                unknown.append(number)
            else:
                found[number] = at_hand
        if not unknown or self._records is None:
            return found, problem
        try:
            read = await self._records.read([prompt.keys[number] for number in unknown], tenant)
        except LateError:
            return found, "late"
        new = {number: read[key] for number in unknown if (key := prompt.keys[number]) in read}
        if sum(map(len, new.values())) <= AT_ONCE_TOKENS:
            good = self._checked(prompt, new)
        else:
            good = await asyncio.to_thread(self._checked, prompt, new)
        for number, ids in good.items():
            self._memory.put(prompt.keys[number], ids)
        return {**found, **good}, "" if len(good) == len(new) else "refused"

    def _checked(self, prompt: Prompt, read: Mapping[int, list[int]]) -> dict[int, Sequence[int]]:
        """Those that fit. What comes from the pool may be anything."""
        tokenizer = self._tokenizer
        fitting: dict[int, Sequence[int]] = {
            number: ids
            for number, ids in read.items()
            if prompt.fits(number, ids, tokenizer.decode, tokenizer.vocabulary)
        }
        if len(fitting) < len(read):
            logger.warning("%d records of answers do not fit their text", len(read) - len(fitting))
        return fitting
