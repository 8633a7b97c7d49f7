"""What the router can ask of a worker beside answers. Pure.

pdserve's workers have routes under `/pd/` for all of it. Another engine may have some of them, and says in
its `/pd/info` which it `lacks`. A server without `/pd/info` is known by what it says of itself elsewhere
(`foreign_info`). The stages of a request ask `Worker.lacks`, and compare no names of engines.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Ability = Literal[
    "info", "load", "prefill", "settled", "pull", "continue", "cache_report", "weights", "salt_header"
]

WITHOUT: Final[dict[Ability, str]] = {
    "info": "its model is as its /v1/models says, its role as the router's configuration does",
    "load": "its load is what this router sends it",
    "prefill": "a prompt is prefilled by a request for one token, and nobody waits for its pages in the pool",
    "settled": "a session's next turn does not wait for the pages of the last one",
    "pull": "no pages of long prompts are read ahead",
    "continue": "a lost stream is not continued by another worker",
    "cache_report": "no figures of what was cached, but those in the answer's own usage",
    "weights": "its weights are not updated by the admin API",
    "salt_header": "tenants cannot use the endpoints where the salt of their cache goes in a header",
}
"""What is so at a worker that lacks it, for people."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards_decoder = msgspec.json.Decoder(_Cards)


class Foreign(msgspec.Struct, frozen=True):
    """A server of another engine, as its `/v1/models` describes it."""

    engine: str
    model: str
    context_length: int


ENGINES: Final = frozenset({"vllm"})
"""Values of `owned_by` of the engines whose servers are taken without routes under `/pd/`."""


def foreign_info(answer: bytes) -> Foreign:
    """From an answer to `GET /v1/models`. Raises ValueError, and what decoding raises: it is none of
    `ENGINES`.
    """
    cards = _cards_decoder.decode(answer).data
    card = next((card for card in cards if not card.parent), None)
    if card is None:
        raise ValueError("its /v1/models lists no model")
    if card.owned_by not in ENGINES:
        raise ValueError(f"its /v1/models says '{card.owned_by[:32]}'")
    return Foreign(card.owned_by, card.id, max(0, min(card.max_model_len or 0, 10**12)))
