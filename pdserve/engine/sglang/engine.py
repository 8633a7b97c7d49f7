"""SGLang's objects in this process, and what they say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pdserve.engine.contract.endpoints import Contract
from pdserve.engine.drain import Drain
from pdserve.engine.http.held import Door
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.prompt_identity import chat_template_fingerprint, tokenizer_fingerprint
from pdserve.engine.sglang import text_offsets
from pdserve.engine.sglang.abilities import contract_of
from pdserve.engine.sglang.prompts import exact_turns, long_texts
from pdserve.engine.sglang.prompts.exact_turns import SglangTurns, tokenizer_of
from pdserve.engine.sglang.tokenizer_manager import names_media, watch
from pdserve.engine.turns.config import ExactTurnsConfig
from pdserve.engine.turns.exact import ExactTurns
from pdserve.engine.turns.memory import Memory
from pdserve.engine.turns.shelf import Shelf
from pdserve.sglang_places import places

PLACES: Final = (
    *places(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.__init__ sets server_args",
        "TokenizerManager.init_model_config sets model_config, served_model_name, is_generation",
        "TokenizerManager.init_running_status sets server_status",
        "TokenizerManager.init_ipc_channels sets load_snapshot_reader",
        "TokenizerManager.init_running_status sets rid_to_state",
        "TokenizerManager.init_lora sets lora_ref_cache",
        "TokenizerManager.abort_request(abort_all)",
        "TokenizerManager.flush_cache(timeout_s)",
        "TokenizerManager.detach_hicache_storage(self)",
        "TokenizerManager.attach_hicache_storage(hicache_storage_backend)",
        "TokenizerManager.attach_hicache_storage(hicache_storage_backend_extra_config_json)",
        "ServerStatus.Up",
        "ServerStatus.Starting",
    ),
    *places(
        "sglang.srt.managers.load_snapshot",
        "create_load_snapshot_reader uses ShmLoadSnapshotReader",
        "ShmLoadSnapshotReader.read_all(self)",
        "LoadSnapshot(num_running_reqs, num_waiting_reqs, num_waiting_uncached_tokens)",
        "LoadSnapshot(num_used_tokens, max_total_num_tokens, max_running_requests)",
    ),
    *places("sglang.srt.configs.model_config", "ModelConfig.__init__ sets is_multimodal"),
    *places(
        "sglang.srt.server_args",
        "ServerArgs(chat_template, enable_deterministic_inference, dp_size)",
        "ServerArgs(enable_priority_scheduling, schedule_low_priority_values_first)",
    ),
)


class Engine:
    """`tokenizer_manager` is SGLang's, or None until its server has made one."""

    def __init__(
        self,
        drain: Drain,
        metrics: WorkerMetrics,
        exact: ExactTurnsConfig | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        """`exact`: give earlier answers the tokens that they were made of. `shelf`: these in the pool."""
        self.app: Any = None
        self.has_started = False
        """The first generation has gone through."""
        self.contract: Contract | None = None
        """What bodies of requests may hold; None until there is a tokenizer manager."""
        self.tokenizer_manager: Any = None
        self.turns: SglangTurns | None = None
        """None until there is a tokenizer manager, and where prompts stay as they are."""
        self._exact = exact
        self._shelf = shelf
        self.door = Door()
        self._long_texts: long_texts.LongTexts | None = None
        self._drain = drain
        self._metrics = metrics
        self._name = ""
        self._host_socket = ""

    def on_listening(self, host_socket: str) -> None:
        """The server listens, and on this Unix socket too; empty: on none."""
        self._host_socket = host_socket

    def begin(self, tokenizer_manager: Any) -> None:
        """SGLang has made its tokenizer manager: follow its requests from now on."""
        self.tokenizer_manager = tokenizer_manager
        self._name = tokenizer_manager.served_model_name
        self.contract = contract_of(tokenizer_manager)
        self.turns = self._make_turns()
        watch(
            tokenizer_manager,
            metrics=self._metrics,
            is_stopping=lambda: self._drain.is_closed,
            door=self.door,
            turns=self.turns,
        )
        self._long_texts = long_texts.LongTexts(tokenizer_manager)
        self._long_texts.measure()
        long_texts.install(self._long_texts)
        text_offsets.install()

    def _make_turns(self) -> SglangTurns | None:
        manager, exact, count = self.tokenizer_manager, self._exact, self._metrics.count_turn
        tokenizer = tokenizer_of(manager) if exact is not None and exact.enabled else None
        if exact is None or tokenizer is None:
            return None
        exact_turns.install()
        if self._shelf is not None:
            self._shelf.warm()
        turns = ExactTurns(tokenizer, Memory(exact.memory_bytes), self._shelf, count)
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

    def facts(self) -> dict[str, Any]:
        """What `/pd/info` says of the model and of how this SGLang reads prompts."""
        manager = self.tokenizer_manager
        assert self._long_texts is not None
        bound = self._long_texts.bound
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
            "longest_token_bytes": bound.longest_token_bytes,
            "text_shrink": bound.text_shrink,
            "exact_turns": "off" if self.turns is None else "on",
            "priorities": _priorities(manager.server_args),
            "host_socket": self._host_socket,
        }

    # -- while weights are replaced (`engine/weights.py`); each returns why it did not work, empty if it did

    @property
    def unfinished(self) -> int:
        """The number of requests that SGLang has."""
        return len(self.tokenizer_manager.rid_to_state)

    def abort_all(self) -> None:
        """End what runs."""
        self.tokenizer_manager.abort_request(abort_all=True)

    async def flush(self) -> str:
        """Empty SGLang's caches on device and host. It does so only when nothing runs."""
        return _why(await self.tokenizer_manager.flush_cache(), "it is not idle")

    async def detach_storage(self) -> str:
        """End SGLang's storage backends. It does so only when nothing runs and no page is on its way."""
        return _why(await self.tokenizer_manager.detach_hicache_storage(), "it is not idle")

    async def attach_storage(self, extra_config: Mapping[str, Any]) -> str:
        """Start a storage backend on each rank, with this extra config."""
        said = await self.tokenizer_manager.attach_hicache_storage(
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config_json=json.dumps(extra_config),
        )
        return _why(said, "it does not say why")

    def keep_name(self) -> None:
        """SGLang names the model after the directory of its new weights; clients know it by its old name."""
        self.tokenizer_manager.served_model_name = self._name

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


def _why(outcome: Any, otherwise: str) -> str:
    """Of one of SGLang's outcomes that have `success` and `message`."""
    return "" if outcome.success else str(outcome.message or otherwise)


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
