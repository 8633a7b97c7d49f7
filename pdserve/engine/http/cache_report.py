"""Cached prompt tokens: the count that the client is told, and the count that this worker found.

`cached_tokens` is the number of prompt tokens that some cache held before the client's request started.
SGLang counts, for each of its own requests, the prompt tokens that it did not compute. In three cases the
two differ:

- A prefill worker computed the prompt first, so this worker finds all of it. The client is told the count of
  the prefill worker.
- This worker continues another worker's stream, and finds the prompt that the other computed. The client is
  told the count of the first worker.
- `n` > 1: SGLang computes the prompt in a request of its own, and every choice finds it. The client is told
  the count of that request.

The router sends the earlier count, prompt by prompt: `x-pdserve-prefilled: DEVICE/HOST/POOL, ...`. The counts
are replaced in what SGLang's engine yields to its API, so usage, `meta_info` and the details agree in every
form of the answer. SGLang's own metrics keep the counts of this worker.

The answer's header `x-pdserve-cached: device=D, host=H, pool=P, computed=C` has the counts of this
worker itself. The router learns from it where the
pages of prompts are.
"""

from __future__ import annotations

from typing import NamedTuple

PREFILLED_HEADER = b"x-pdserve-prefilled"
CACHED_HEADER = b"x-pdserve-cached"


class Found(NamedTuple):
    """Prompt tokens that were found cached, by place."""

    device: int = 0
    host: int = 0
    pool: int = 0


class Reuse:
    """The cached tokens of one HTTP request, prompt by prompt."""

    def __init__(self, told: list[Found]) -> None:
        """`told`: the counts of an earlier stage; empty where there was none."""
        self._told = told
        self._prompts = self._choices = 1
        self._numbers: dict[str, int] = {}
        self._own: dict[int, tuple[Found, int]] = {}  # by prompt: what was found of so many tokens

    def begin(self, prompts: int, choices: int) -> None:
        """SGLang begins the request: the number of its prompts, and of choices for each."""
        self._prompts, self._choices = prompts, choices

    def sent(self, rid: str) -> None:
        """An SGLang request went to the scheduler. Their order is known: with several choices first one
        request for each prompt, to compute it, then the choices of each prompt.
        """
        self._numbers[rid] = len(self._numbers)

    def note(self, rid: str, own: Found, prompt_tokens: int) -> None:
        """An SGLang request found `own` of its prompt; the first one of each prompt counts."""
        if (prompt := self._prompt_of(rid)) is not None:
            self._own.setdefault(prompt, (own, prompt_tokens))

    def told(self, rid: str) -> Found | None:
        """The count to tell of an SGLang request instead of its own, if any."""
        prompt = self._prompt_of(rid)
        if prompt is None:
            return None
        if prompt < len(self._told):
            return self._told[prompt]
        return self._own[prompt][0] if self._choices > 1 and prompt in self._own else None

    def _prompt_of(self, rid: str) -> int | None:
        number = self._numbers.get(rid)
        if number is None or self._choices == 1 or number < self._prompts:
            return number
        return (number - self._prompts) // self._choices

    def own(self) -> dict[str, tuple[int, int]]:
        """For each prompt that this worker was the first to look for: tokens found, and tokens of the prompt,
        by the id of its SGLang request. Empty where an earlier stage computed them.
        """
        if self._told:
            return {}
        return {
            rid: (sum(self._own[number][0]), self._own[number][1])
            for rid, number in self._numbers.items()
            if number in self._own
        }

    def by_tier(self) -> dict[str, int]:
        """Prompt tokens by source, the computed ones included. While a stream of several prompts runs, only
        of prompts whose count is known. Empty before the first.
        """
        if not self._own:
            return {}
        founds, lengths = zip(*self._own.values(), strict=True)
        found = Found(*map(sum, zip(*founds, strict=True)))
        return {**found._asdict(), "computed": max(0, sum(lengths) - sum(found))}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header with these counts; none before the first is known."""
        said = ", ".join(f"{tier}={tokens}" for tier, tokens in self.by_tier().items())
        return [(CACHED_HEADER, said.encode())] if said else []


def parse_prefilled(value: bytes) -> list[Found]:
    """Parse `x-pdserve-prefilled`; [] for a value that is malformed."""
    try:
        return [Found(*map(int, one.split(b"/"))) for one in value.split(b",")]
    except (ValueError, TypeError):
        return []
