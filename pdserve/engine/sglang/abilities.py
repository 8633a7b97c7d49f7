"""What this worker's SGLang can be asked: the contract of its request bodies, from its own models and
template.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from pdserve.engine.contract.conversations import Abilities
from pdserve.engine.contract.endpoints import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Contract

_ALSO_READ: Final = frozenset({"reasoning"})
"""Members that SGLang's models take before they look at their fields."""
_READ_BY_ROUTER: Final = frozenset(
    {"prompt_cache_key", "prompt_cache_retention", "cache_control", "diagnostics"}
)
_MARK: Final = "a text that no template has: 6d1f"


def contract_of(manager: Any) -> Contract:
    """The contract of the worker whose tokenizer manager this is."""
    from sglang.srt.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams

    models: dict[str, Any] = {
        CHAT: ChatCompletionRequest,
        COMPLETIONS: CompletionRequest,
        MESSAGES: AnthropicMessagesRequest,
        COUNT_TOKENS: AnthropicCountTokensRequest,
        RESPONSES: ResponsesRequest,
    }
    abilities = Abilities(
        prints_role=functools.cache(lambda role: _prints(manager.tokenizer, role)),
        prints_inline_system=_prints_inline_system(manager),
        takes_media=bool(manager.model_config.is_multimodal),
        has_reasoning_parser=bool(manager.server_args.reasoning_parser),
    )
    also = _ALSO_READ | _READ_BY_ROUTER
    known = {path: frozenset(model.model_fields) | also for path, model in models.items()}
    return Contract(abilities, known, frozenset(inspect.signature(SamplingParams).parameters))


def _prints_inline_system(manager: Any) -> bool:
    """What SGLang will find of the template, once it serves chats. Where it has an encoder of its own for the
    model, it is left to decide.
    """
    from sglang.srt.parser.conversation import chat_template_exists
    from sglang.srt.parser.template_detection import detect_inline_system_support

    named = manager.server_args.chat_template
    if named and chat_template_exists(named):
        return False
    template = getattr(manager.tokenizer, "chat_template", None)
    return not isinstance(template, str) or bool(detect_inline_system_support(template))


def _prints(tokenizer: Any, role: str) -> bool:
    """Whether the chat template shows a message of this role. A tokenizer without a template leaves
    messages to SGLang's own encoders, which know their roles.
    """
    if not getattr(tokenizer, "chat_template", None):
        return True
    messages = [{"role": role, "content": _MARK}, {"role": "user", "content": "a"}]
    try:
        return _MARK in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # boundary: a template of strangers, which refuses a role by any exception
        return False
