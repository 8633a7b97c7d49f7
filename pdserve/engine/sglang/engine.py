"""SGLang's objects in this process, and what they say of themselves.

What it can be asked is the contract of its request bodies, from its own models and template.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, Final

from pdserve.engine.config import ExactTurnsConfig
from pdserve.engine.contract.conversations import Abilities
from pdserve.engine.contract.endpoints import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Contract
from pdserve.engine.drain import Drain
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.model_dir import chat_template_fingerprint, tokenizer_fingerprint
from pdserve.engine.sglang import serving, text_offsets
from pdserve.engine.sglang.exact_turns import SglangTurns, tokenizer_of
from pdserve.engine.sglang.tokenizer_manager import names_media
from pdserve.engine.turns.exact import ExactTurns
from pdserve.engine.turns.record import MEMORY_BYTES, Memory
from pdserve.engine.turns.shelf import Shelf


class Engine:
    """`tokenizer_manager` is SGLang's, or None until its server has made one."""

    def __init__(
        self,
        drain: Drain,
        metrics: WorkerMetrics,
        exact: ExactTurnsConfig | None = None,
        shelf: Shelf | None = None,
        namespace: str = "",
    ) -> None:
        """`exact`: give earlier answers the tokens that they were made of. `shelf`: these in the pool.
        `namespace`: of the worker's pages; empty: they are in no pool.
        """
        self.app: Any = None
        self.has_started = False
        """The first generation has gone through."""
        self.contract: Contract | None = None
        """What bodies of requests may hold; None until there is a tokenizer manager."""
        self.tokenizer_manager: Any = None
        self.turns: SglangTurns | None = None
        """None until there is a tokenizer manager, and where prompts stay as they are."""
        self._exact = exact
        self._memory = Memory(MEMORY_BYTES)
        self._shelf = shelf
        self._namespace = namespace
        self._drain = drain
        self._metrics = metrics

    def begin(self, tokenizer_manager: Any) -> None:
        """SGLang has made its tokenizer manager (`manager_class`): follow its requests from now on."""
        self.tokenizer_manager = tokenizer_manager
        self.contract = contract_of(tokenizer_manager)
        self.turns = self._make_turns()
        tokenizer_manager.track(self._metrics, lambda: self._drain.is_closed, self.turns, self._namespace)
        text_offsets.install()

    def take_places(self) -> None:
        """SGLang's app has its serving objects, and answers no request yet."""
        serving.take_places(self.app_state, self.tokenizer_manager.server_args.page_size)

    def _make_turns(self) -> SglangTurns | None:
        manager, exact, count = self.tokenizer_manager, self._exact, self._metrics.count_turn
        tokenizer = tokenizer_of(manager) if exact is not None and exact.enabled else None
        if exact is None or tokenizer is None:
            return None
        if self._shelf is not None:
            self._shelf.warm()
        turns = ExactTurns(tokenizer, self._memory, self._shelf, count)
        return SglangTurns(manager, turns, count)

    @property
    def app_state(self) -> Any:
        """SGLang's `app.state`, with the OpenAI serving objects."""
        return self.app.state

    @property
    def is_up(self) -> bool:
        """SGLang serves, and has not called itself unhealthy since."""
        manager = self.tokenizer_manager
        return manager is not None and str(manager.server_status.value) == "Up"

    async def flush(self, timeout_s: float) -> str:
        """Empty this worker's own caches once no request runs, within this time. Why they are not; empty:
        they are.
        """
        self._memory.clear()
        self.tokenizer_manager.serving_chat_class.encodings.clear()
        said = await self.tokenizer_manager.flush_cache(timeout_s=timeout_s)
        return "" if said.success else str(said.message or "requests run")

    def facts(self) -> dict[str, Any]:
        """What `/pd/info` says of the model and of how this SGLang reads prompts."""
        manager = self.tokenizer_manager
        named = _template(manager.server_args.chat_template)
        return {
            "model": manager.served_model_name,
            "context_length": manager.model_config.context_len,
            "deterministic": bool(manager.server_args.enable_deterministic_inference),
            "tasks": ["generate" if manager.is_generation else "embed"],
            "tokenizer": tokenizer_fingerprint(manager.tokenizer),
            "chat_template": chat_template_fingerprint(manager.tokenizer, named),
            "is_multimodal": bool(manager.model_config.is_multimodal),
            "names_media": names_media(manager),
            "adapters": sorted(manager.lora_ref_cache),
            "exact_turns": "off" if self.turns is None else "on",
            "priorities": _priorities(manager.server_args),
        }

    def load(self) -> dict[str, int] | None:
        """Requests running and waiting, the uncached prompt tokens of those that wait, the KV memory that is
        free or can be freed, in tokens, and how many requests run at most; summed over data-parallel ranks.
        None until SGLang has said it.

        The scheduler writes a `LoadSnapshot` into shared memory after its batches and when it falls idle.
        Reading it asks nothing of the scheduler.
        """
        ranks = self.tokenizer_manager.load_snapshot_reader.read_all()
        if not ranks:
            return None
        return {
            "running_requests": sum(rank.num_running_reqs for rank in ranks),
            "waiting_requests": sum(rank.num_waiting_reqs for rank in ranks),
            "queued_tokens": sum(rank.num_waiting_uncached_tokens for rank in ranks),
            "free_kv_tokens": sum(max(0, one.max_total_num_tokens - one.num_used_tokens) for one in ranks),
            "max_running_requests": sum(one.max_running_requests for one in ranks),
        }


def _priorities(server_args: Any) -> str:
    """Which ones come first: see `WorkerInfo.priorities` of the router."""
    if not server_args.enable_priority_scheduling:
        return "none"
    return "low_first" if server_args.schedule_low_priority_values_first else "high_first"


def _template(named: str | None) -> str | None:
    """What SGLang was told to use: a file's text, wherever it lies, or the name of one of its own."""
    path = Path(named) if named else None
    return (
        path.read_text(errors="replace", encoding="utf-8") if path is not None and path.is_file() else named
    )


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
