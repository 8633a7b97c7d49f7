"""Prompt tokens that were found cached: what the client is told, and what this worker itself found.

SGLang counts, for each of its requests, the prompt tokens that it did not compute. A client means something
else by `cached_tokens` in three cases:

- A prefill worker was asked first: here all of the prompt is found, put into the pool just before. The client
  is told what the prefill worker found.
- A stream is gone on with here: what its first worker computed is found. The client is told what that one
  found.
- `n` > 1: SGLang computes the prompt in a request of its own, and every choice finds it. The client is told
  what that request found.

The router says what was found before, prompt by prompt: `x-pdserve-prefilled: DEVICE/HOST/POOL, ...`. The
numbers are replaced where SGLang makes the answer, so usage, `meta_info` and the details agree in every form
of it. What this worker itself found stands in the answer's header `x-pdserve-cached: device=D, host=H,
pool=P, ssd=S, computed=C` (pool: in a pool node's memory; ssd: brought up from a tier below it): the router
learns from it where prompts live.
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
    ssd: int = 0

    @property
    def by_memory(self) -> tuple[int, int, int]:
        """Device, host, pool: its memory and what is below it together."""
        return self.device, self.host, self.pool + self.ssd


class Reuse:
    """What one HTTP request found, prompt by prompt."""

    def __init__(self, told: list[Found]) -> None:
        """`told`: what an earlier stage found; empty where there was none."""
        self._told = told
        self._prompts = self._choices = 1
        self._numbers: dict[str, int] = {}
        self._own: dict[int, tuple[Found, int]] = {}  # by prompt: what was found of so many tokens

    def begin(self, prompts: int, choices: int) -> None:
        """SGLang has begun to serve the request: so many prompts, and so many choices for each."""
        self._prompts, self._choices = prompts, choices

    def sent(self, rid: str) -> None:
        """An SGLang request went to the scheduler. They come in order: with several choices first one for
        each prompt, to compute it, then the choices of each.
        """
        self._numbers[rid] = len(self._numbers)

    def found(self, rid: str, own: Found, prompt_tokens: int) -> Found | None:
        """An SGLang request found `own` of its prompt. Returns what is said instead, if anything."""
        number = self._numbers.get(rid)
        if number is None:
            return None
        prompt = number
        if self._choices > 1 and number >= self._prompts:
            prompt = (number - self._prompts) // self._choices
        first, _ = self._own.setdefault(prompt, (own, prompt_tokens))
        if prompt < len(self._told):
            return self._told[prompt]
        return first if self._choices > 1 else None

    def by_tier(self) -> dict[str, int]:
        """Where the prompts' tokens came from, those computed here among them; of a stream of several prompts
        those that are known so far. Empty before the first.
        """
        if not self._own:
            return {}
        founds, lengths = zip(*self._own.values(), strict=True)
        found = Found(*map(sum, zip(*founds, strict=True)))
        return {**found._asdict(), "computed": max(0, sum(lengths) - sum(found))}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header that says so; none before it is known."""
        said = ", ".join(f"{tier}={tokens}" for tier, tokens in self.by_tier().items())
        return [(CACHED_HEADER, said.encode())] if said else []


def parse_prefilled(value: bytes) -> list[Found]:
    """The value of `x-pdserve-prefilled`; [] for one that is none."""
    try:
        return [Found(*map(int, one.split(b"/"))) for one in value.split(b",")]
    except (ValueError, TypeError):
        return []
