"""SGLang's chats and exact turns (`engine/turns`): prompts get recorded tokens, and answers are recorded.

SGLang (0.5.23) renders a chat's template to text and encodes it (`parallel_prompt_encode`), in a thread. The
text is lost then. So the tokens are a list that remembers its text (`Rendered`, made in `serving`), and it
reaches `generate_request` as it is. What SGLang makes otherwise is an ordinary list, and stays: prompts
of multimodal models and of templates that yield tokens, `input_ids` and begun answers of clients.

A direct hand-off is left alone. Both workers begin at the same time, so neither can tell the other what it
chose, and the KV of other tokens would be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.request_context import bootstrap_of_request
from pdserve.engine.model_dir import tokenizer_fingerprint
from pdserve.engine.sglang.children.scheduler import POOL_ROOM
from pdserve.engine.turns.exact import Asked, ExactTurns, Turn
from pdserve.engine.turns.segments import StopTokens

logger = logging.getLogger(__name__)


class Rendered(list[int]):
    """The tokens of a prompt, and the text that they encode."""

    text: str
    answers: int = 0
    """Messages of the assistant in it."""

    @classmethod
    def of(cls, ids: Any, text: Any) -> Any:
        """These tokens with their text; what is no list of tokens stays as it is."""
        if not isinstance(text, str) or type(ids) is not list:
            return ids
        rendered = cls(ids)
        rendered.text = text
        return rendered


class ModelTokenizer:
    """SGLang's tokenizer as `ExactTurns` asks it."""

    def __init__(self, manager: Any) -> None:
        self._tokenizer = manager.tokenizer
        self.vocabulary = int(manager.model_config.vocab_size)
        self.fingerprint = tokenizer_fingerprint(self._tokenizer)
        self.stop_tokens = StopTokens(_stop_texts(self._tokenizer, manager.model_config.hf_eos_token_id))

    def decode(self, ids: Sequence[int]) -> str:
        """The text with special tokens; nothing is cleaned up."""
        text: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return text


def tokenizer_of(manager: Any) -> ModelTokenizer | None:
    """None where prompts of this model cannot be cut at stop tokens."""
    if manager.tokenizer is None or manager.model_config.is_multimodal or not manager.is_generation:
        return None
    made = ModelTokenizer(manager)
    return made if made.stop_tokens.texts else None


class SglangTurns:
    """Around `TokenizerManager.generate_request`."""

    def __init__(self, manager: Any, turns: ExactTurns, count: Callable[[str], None]) -> None:
        self._manager = manager
        self._turns = turns
        self._count = count

    async def begin(self, asked: Any, http: HttpRequest | None, *, is_counted: bool = True) -> Turn | None:
        """Give a request to SGLang the tokens that its prompt had before. None: its answer is not recorded.
        Never raises: without recorded tokens the request is what it was. `is_counted`: it is computed now,
        and not only looked up.
        """
        ids = getattr(asked, "input_ids", None)
        if not isinstance(ids, Rendered):
            return None
        room = bootstrap_of_request()
        if room is not None and room.room != POOL_ROOM:
            if ids.answers and is_counted:
                self._count("direct")
            return None
        try:
            wanted = None if http is None else http.turns_wanted
            turn = await self._turns.prompt(self._asked(asked, ids), wanted, is_counted=is_counted)
        # boundary: the tokenizer is the model's own code, and a chat is served without recorded tokens too
        except Exception:
            logger.exception("a prompt is encoded from its text: recorded tokens could not be put in")
            return None
        if turn is not None:
            asked.input_ids = turn.ids
            if http is not None:
                http.turns_taken = turn.replaced
        return turn

    async def end(self, turn: Turn, http: HttpRequest, prompt: Sequence[int], output: Sequence[int]) -> None:
        """The model has finished an answer to the prompt. Never raises."""
        try:
            stored = await self._turns.answer(turn, [*prompt, *output])
        # boundary: as above
        except Exception:
            logger.exception("the tokens of an answer could not be recorded")
            return
        if stored is not None:
            http.side_writes.append(stored.done)
            http.record_keys += stored.keys

    def _asked(self, asked: Any, ids: Rendered) -> Asked:
        manager, sampling = self._manager, asked.sampling_params
        new = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
        return Asked(
            ids.text,
            ids,
            ids.answers,
            adapter=asked.lora_path,
            extra_key=asked.extra_key,
            cache_salt=asked.cache_salt,
            most_tokens=manager.context_len - manager.num_reserved_tokens - max(1, new or 0),
        )


def _stop_texts(tokenizer: Any, ids: Any) -> dict[int, str]:
    """The stop tokens that stand in a prompt as one piece of text, and are encoded so."""
    found: dict[int, str] = {}
    wanted = {
        *(ids or ()),
        tokenizer.eos_token_id,
        *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
    }
    for token in wanted - {None}:
        text = tokenizer.decode([token], skip_special_tokens=False)
        if text and list(tokenizer.encode(f"a{text}b", add_special_tokens=False)).count(token) == 1:
            found[int(token)] = text
    return found
