"""A stream that another worker began, continued by this SGLang; and the marks of any stream.

**The prompt.** The tokens so far are added to the prompt before it goes to the scheduler, and the limits of
new tokens are lowered by their number. A token whose character is not complete is left out: it is generated
again. So the model is given exactly what it had produced, and seeded sampling, which depends on the position,
continues as it would have (with --enable-deterministic-inference: without it SGLang 0.5.23 takes no seed).
Log-probabilities, penalties, stop strings and grammars make the rest of an answer depend on more than the
prompt. Where SGLang's parameters have any of them, the answer is a 400.

**The answer.** What the engine yields is given the earlier text and tokens in front, and counts as if all of
it had been computed here. SGLang's own formatting sees first the earlier text, whose events are dropped, then
the rest.

The text of the tokens is made as SGLang's detokenizer makes it (`init_incremental_detokenize`, 0.5.23): they
are decoded behind the prompt's last five tokens, whose text is then cut off.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from pdserve.engine.contract.sampling import check_ids
from pdserve.engine.http.marked_stream import MarkedStream, SoFar
from pdserve.engine.sglang.answers import clipped
from pdserve.errors import RequestError

DETOKENIZE_BEHIND: Final = 5  # tokens of the prompt: INIT_INCREMENTAL_DETOKENIZATION_OFFSET
MAX_INCOMPLETE: Final = 8  # tokens that one character may be spread over, and more
REPLACEMENT: Final = "\ufffd"
_LOOKING_BACK = (
    *("frequency_penalty", "presence_penalty", "stop_strs", "stop_regex_strs", "watermark"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
)
_SGLANGS_OWN = "__sglang_"
_THINK_END = "__sglang_reasoning_end_token_ids"


@dataclass(frozen=True)
class Continuation:
    """What came before a stream, and how its rest is shown."""

    delivered: str = ""  # text that the client has
    text: str = ""  # of `kept`
    kept: Sequence[int] = ()  # tokens so far that were added to the prompt
    reasoning: int | None = None  # tokens of reasoning among them; None where nothing is said of it
    reasoning_is_over: bool = False

    def shifted(self, content: dict[str, Any]) -> dict[str, Any]:
        """What the engine yielded, as if all had been computed here."""
        if "prompt_tokens" not in content["meta_info"]:  # aborted while it waited
            return content
        meta, count = dict(content["meta_info"]), len(self.kept)
        meta["prompt_tokens"] -= count
        meta["completion_tokens"] += count
        most = max(0, meta["prompt_tokens"] - 1)  # SGLang computes a prompt's last token itself
        meta["cached_tokens"] = min(meta.get("cached_tokens", 0), most)
        if meta.get("cached_tokens_details"):
            meta["cached_tokens_details"] = clipped(meta["cached_tokens_details"], most)
        more = meta.pop("reasoning_tokens", 0)
        if self.reasoning is not None:
            meta["reasoning_tokens"] = self.reasoning + (0 if self.reasoning_is_over else more)
        output_ids = [*self.kept, *content["output_ids"]]
        return {**content, "text": self.text + content["text"], "output_ids": output_ids, "meta_info": meta}

    def earlier(self, content: dict[str, Any]) -> dict[str, Any]:
        """The step that the first worker ended with, from a later one."""
        meta = {**content["meta_info"], "finish_reason": None, "completion_tokens": len(self.kept)}
        return {**content, "text": self.delivered, "output_ids": list(self.kept), "meta_info": meta}


def extend_prompt(tokenized: Any, so_far: SoFar, manager: Any) -> Continuation:
    """Add the tokens so far to the prompt. `tokenized`: SGLang's TokenizedGenerateReqInput. Raises
    ValueError where the answer cannot be continued.
    """
    if tokenized.mm_inputs is not None or tokenized.input_ids is None:
        raise ValueError("an answer to this kind of prompt cannot be continued")
    if tokenized.return_logprob:
        raise ValueError("an answer with log-probabilities cannot be continued")
    check_ids(so_far.token_ids, manager.model_config.vocab_size)
    sampling = tokenized.sampling_params
    if said := _looks_back(sampling):
        raise ValueError(f"an answer under {said} cannot be continued")

    def decode(ids: Sequence[int]) -> str:
        text: str = manager.tokenizer.decode(
            ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        return text

    prompt = list(tokenized.input_ids)
    whole, text, kept = _whole_characters(prompt[-DETOKENIZE_BEHIND:], so_far.token_ids, decode)
    if len(whole) < so_far.characters:
        raise ValueError("the tokens do not make the text that was sent")
    tokenized.input_ids = type(tokenized.input_ids)("q", [*prompt, *kept])
    if sampling.max_new_tokens is not None:
        sampling.max_new_tokens = max(1, sampling.max_new_tokens - len(kept))
    sampling.min_new_tokens = max(0, sampling.min_new_tokens - len(kept))
    reasoning, is_over = _reasoning(tokenized, kept, manager.model_config)
    return Continuation(whole[: so_far.characters], text, kept, reasoning, is_over)


def _whole_characters(
    behind: list[int], ids: list[int], decode: Callable[[Sequence[int]], str]
) -> tuple[str, str, list[int]]:
    """(text of `ids`, text of as many of them as end with a whole character, those tokens)."""
    start = len(decode(behind))
    whole = decode([*behind, *ids])[start:]
    for count in range(len(ids), max(0, len(ids) - MAX_INCOMPLETE), -1):
        text = decode([*behind, *ids[:count]])[start:]
        if not text.endswith(REPLACEMENT) and whole.startswith(text):
            return whole, text, ids[:count]
    return whole, "", []


def _reasoning(tokenized: Any, kept: list[int], model_config: Any) -> tuple[int | None, bool]:
    """(tokens of reasoning among `kept`, whether it has ended), as SGLang counts them
    (`update_reasoning_tokens`). Where the model begins it by itself SGLang cannot count the rest, and nothing
    is said.
    """
    if not tokenized.require_reasoning:
        return None, False
    custom = tokenized.sampling_params.custom_params or {}
    end = list(custom.get(_THINK_END) or model_config.think_end_ids or ())
    ends = (i for i in range(len(end), len(kept) + 1) if kept[i - len(end) : i] == end)
    over_at = next(ends, None) if end else None
    return (len(kept), False) if over_at is None else (over_at, True)


def _looks_back(sampling: Any) -> str:
    """What makes the rest of an answer depend on more than the tokens so far, once they are a part of the
    prompt; empty where nothing does. The router has looked at the client's body; these are SGLang's own
    SamplingParams, with what the model's generation_config.json and --preferred-sampling-params set. What
    SGLang notes for itself among `custom_params` serves grammars and counting.
    """
    set_for = {name: getattr(sampling, name) for name in _LOOKING_BACK}
    set_for["custom_params"] = [
        key for key in sampling.custom_params or () if not key.startswith(_SGLANGS_OWN)
    ]
    set_for["repetition_penalty"] = sampling.repetition_penalty != 1.0
    return ", ".join(name for name, value in set_for.items() if value)


async def marked(
    contents: AsyncGenerator[Any, None],
    stream: MarkedStream,
    continuation_of: Callable[[str], Continuation | None],
    *,
    token_ids_are_wanted: bool,
    choices: Callable[[], int] = lambda: 1,
) -> AsyncGenerator[Any, None]:
    """What the engine yields, as its caller may see it. A step's events are marked when the caller comes for
    the next step. `choices`: answers to each prompt, once the engine yields.

    `continuation_of`: by SGLang's request id, once it is with the scheduler. `token_ids_are_wanted`: the
    client gets token ids beside the text; they do not end where the text does, so they cannot be cut there.
    """
    is_begun = stream.so_far is None
    sent = 0  # tokens that the marks have told
    used: dict[int, tuple[int, int]] = {}  # prompt and output tokens, by the number of the answer
    async with aclosing(contents):
        async for content in contents:
            if "index" in content or "text" not in content or token_ids_are_wanted:
                await stream.end_marks()
            if not stream.is_marked:
                _note_usage(used, content)
                yield content
                continue
            finish = content["meta_info"].get("finish_reason")
            if not is_begun and finish and finish.get("status_code"):
                raise ValueError(_refused(stream, finish))
            step = content
            if stream.so_far is not None:
                before = continuation_of(content["meta_info"]["id"]) or Continuation()
                step = before.shifted(content)
                if not is_begun:
                    is_begun, sent = True, len(before.kept)
                    with stream.dropping():
                        yield before.earlier(step)
            _note_usage(used, step)
            if finish:
                yield step
            elif stream.so_far is None or len(step["text"]) > stream.so_far.characters:
                yield step
                count = step["meta_info"]["completion_tokens"]
                await stream.mark(len(step["text"]), sent, step["output_ids"][sent:count])
                sent = count
    if used:
        prompts = {number // choices(): prompt for number, (prompt, _) in used.items()}
        stream.tell_usage(sum(prompts.values()), sum(output for _, output in used.values()))


def _note_usage(used: dict[int, tuple[int, int]], content: Any) -> None:
    meta = content.get("meta_info", {})
    used[content.get("index") or 0] = meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0)


def _refused(stream: MarkedStream, finish: dict[str, Any]) -> str:
    """SGLang aborted the request before it computed anything: it is answered with SGLang's status. Returns
    its message.
    """
    status, message = int(finish["status_code"]), str(finish.get("message") or "the request was aborted")
    type_ = "invalid_request_error" if status < 500 else "server_error"
    stream.refuse(RequestError(status, message, type_=type_))
    return message
