"""Start-up self-check: SGLang still has every place pdserve leans on, and what we put there computes the
right thing.

SGLang only logs what a plugin raises, and a hook that silently missed its place would serve wrong answers or
kill a thread later. So a worker checks before it starts anything, and stops with one line that names what is
missing.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdserve.engine.device import Device
from pdserve.errors import StartupError

logger = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"


@dataclass(frozen=True)
class Place:
    """An attribute of SGLang that pdserve calls, replaces or wraps, with the parameters it counts on."""

    module: str
    attribute: str
    parameters: tuple[str, ...] = ()


_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_SERVER = "sglang.srt.entrypoints.http_server"
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_SERVING = "sglang.srt.entrypoints.openai"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"

PLACES: tuple[Place, ...] = (
    Place(
        "sglang.srt.managers.cache_controller",
        "HiCacheController._page_get_zero_copy",
        ("operation", "hash_values", "host_indices", "extra_info"),
    ),
    Place(_STREAMER, "SchedulerOutputStreamer.get_cached_tokens_details", ("req",)),
    Place(
        _SERVER,
        "launch_server",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "launch_callback",
        ),
    ),
    Place(_SERVER, "app.add_middleware"),
    Place(_SERVER, "get_global_state"),
    Place("sglang.srt.entrypoints.api_contract", "generate_contract_error", ("body",)),
    Place("sglang.srt.entrypoints.engine", "init_tokenizer_manager", ("server_args", "port_args")),
    Place("sglang.srt.model_loader.checkpoint_quantization", "resolve_checkpoint_quant_spec", ("hf_config",)),
    Place(
        "sglang.srt.sampling.sampling_params",
        "SamplingParams",
        (
            *("max_new_tokens", "min_new_tokens", "custom_params", "watermark", "repetition_penalty"),
            *("frequency_penalty", "presence_penalty", "stop_strs", "stop_regex_strs"),
            *("json_schema", "regex", "ebnf", "structural_tag"),
        ),
    ),
    Place("sglang.srt.server_args", "prepare_server_args", ("argv",)),
    Place(_TOKENIZER, "TokenizerManager.generate_request", ("obj", "request")),
    Place(_TOKENIZER, "TokenizerManager._tokenize_texts", ("texts",)),
    Place(_TOKENIZER, "TokenizerManager.abort_request", ("rid", "abort_all")),
    Place(_TOKENIZER, "TokenizerManager.auto_create_handle_loop"),
    Place(_TOKENIZER, "TokenizerManager._init_req_state", ("obj", "request")),
    Place(_TOKENIZER, "TokenizerManager._send_one_request", ("tokenized_obj",)),
    Place(_TOKENIZER, "TokenizerManager._handle_batch_output", ("recv_obj",)),
    Place(_TOKENIZER, "TokenizerManager._send_batch_request", ("tokenized_objs",)),
    Place(_TOKENIZER, "TokenizerManager._dispatch_to_scheduler"),
    Place(_TOKENIZER, "TokenizerManager.set_server_stop_hook", ("hook",)),
    Place(_TOKENIZER, "ReqState", ("finished", "output_ids", "obj", "dispatched", "abort_sent")),
    Place("sglang.srt.managers.io_struct", "ShutdownReq"),
    Place(
        "sglang.srt.managers.io_struct",
        "GenerateReqInput",
        ("rid", "lora_id", "mm_hashes", "positional_embed_overrides", "return_prompt_token_ids"),
    ),
    Place(
        "sglang.srt.managers.io_struct",
        "TokenizedGenerateReqInput",
        ("input_ids", "mm_inputs", "sampling_params", "require_reasoning"),
    ),
    Place("sglang.srt.managers.scheduler", "Scheduler.is_fully_idle", ("self",)),
    Place("sglang.srt.managers.scheduler", "Scheduler._process_hicache_events", ("self",)),
    Place("sglang.srt.managers.scheduler", "Scheduler.abort_request", ("recv_req",)),
    Place("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache.has_ongoing_prefetch", ("handle",)),
    Place("sglang.srt.utils", "kill_process_tree", ("parent_pid", "include_parent")),
    Place(
        f"{_SERVING}.serving_chat",
        "OpenAIServingChat._convert_to_internal_request",
        ("request", "raw_request"),
    ),
    Place(f"{_SERVING}.serving_chat", "OpenAIServingChat._validate_request"),
    Place(
        f"{_SERVING}.serving_completions",
        "OpenAIServingCompletion._convert_to_internal_request",
        ("request", "raw_request"),
    ),
    Place(_STORAGE, "HiCacheStorage.batch_exists", ("keys", "extra_info")),
    Place(_STORAGE, "HiCacheStorage.batch_get_v1", ("keys", "host_indices", "extra_info")),
    Place(_STORAGE, "HiCacheStorage.batch_set_v1", ("keys", "host_indices", "extra_info")),
    Place(_STORAGE, "HiCacheStorage.register_mem_pool_host", ("mem_pool_host",)),
    Place(
        _STORAGE,
        "HiCacheStorageConfig",
        (
            "tp_rank",
            "tp_size",
            "pp_rank",
            "pp_size",
            "attn_cp_size",
            "is_mla_model",
            "extra_config",
        ),
    ),
    Place("sglang.srt.mem_cache.pool_host.mha", "MHATokenToKVPoolHost.get_page_buffer_meta", ("indices",)),
    Place("sglang.srt.mem_cache.utils", "get_hash_str", ("token_ids", "prior_hash", "page_size")),
    Place("sglang.srt.mem_cache.utils", "storage_namespace_seed", ("extra_key", "cache_salt")),
)


def check(device: Device) -> None:
    """Check the installed SGLang, and on CPU put the hooks in place and try them.

    Raises StartupError naming everything that does not fit. Imports SGLang: call it after `prepare.choose`.
    """
    _check_version()
    problems = list(missing_places(PLACES))
    if device == "cpu":
        from pdserve.engine.sglang.cpu import hooks

        problems += hooks.missing()
    if not problems:
        if device == "cpu":
            hooks.apply()
        problems += _wrong_results(device)
    if problems:
        raise StartupError(
            f"SGLang {sglang_version()} does not fit this pdserve (tested with {TESTED_SGLANG}): "
            + "; ".join(problems)
        )


def sglang_version() -> str:
    """Version of the installed SGLang. Raises StartupError when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError as error:
        raise StartupError(
            f"SGLang is not installed: pip install sglang=={TESTED_SGLANG} (see launch/requirements-cpu.txt "
            "for machines without a GPU)"
        ) from error


def _check_version() -> None:
    found = sglang_version()
    if found != TESTED_SGLANG:
        logger.warning("SGLang %s is installed; pdserve is tested with %s", found, TESTED_SGLANG)


def missing_places(places: tuple[Place, ...]) -> Iterator[str]:
    """What of `places` the installed SGLang lacks, one phrase each."""
    for place in places:
        name = f"{place.module}.{place.attribute}"
        try:
            target: Any = importlib.import_module(place.module)
        except ImportError as error:
            yield f"{name}: {error}"
            continue
        try:
            for part in place.attribute.split("."):
                target = getattr(target, part)
        except AttributeError:
            yield f"{name} is not there"
            continue
        if place.parameters:
            unknown = set(place.parameters) - set(inspect.signature(target).parameters)
            if unknown:
                yield f"{name} takes no {', '.join(sorted(unknown))}"


def _wrong_results(device: Device) -> Iterator[str]:
    checks: list[tuple[str, Callable[[], bool]]] = [("page hashes", page_hashes_agree)]
    if device == "cpu":
        from pdserve.engine.sglang.cpu import trials

        checks += [
            ("page copies, page_first_direct", trials.page_first_copies_agree),
            ("page copies, layer_first", trials.layer_first_copies_agree),
            ("extend attention", trials.attention_agrees),
        ]
    for name, agrees in checks:
        if not agrees():
            yield f"{name} give wrong results"


def page_hashes_agree() -> bool:
    """SGLang's page hashes of this process equal ours, with and without a namespace.

    On a GPU machine this compiles SGLang's native hash, once per machine: raises StartupError, naming what to
    install, when that fails.
    """
    from sglang.srt.mem_cache import utils

    from pdserve.pages import namespace_seed, page_hashes

    tokens = [(7919 * i) % 150_000 for i in range(3 * 16)]
    for extra_key, cache_salt in ((None, None), ("tenant", "sält")):
        try:
            theirs = utils.get_hash_str(
                tokens, utils.storage_namespace_seed(extra_key, cache_salt), page_size=16
            )
        except RuntimeError as error:
            raise StartupError(
                "SGLang's page hash could not be compiled: install a C++ compiler, ninja and OpenSSL's "
                "headers (on Debian: apt-get install g++ ninja-build libssl-dev)"
            ) from error
        if theirs != [
            digest.hex() for digest in page_hashes(tokens, 16, namespace_seed(extra_key, cache_salt))
        ]:
            return False
    return True
