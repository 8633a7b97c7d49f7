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
import math
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

PLACES: tuple[Place, ...] = (
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
    Place("sglang.srt.entrypoints.engine", "init_tokenizer_manager", ("server_args", "port_args")),
    Place("sglang.srt.server_args", "prepare_server_args", ("argv",)),
    Place(_TOKENIZER, "TokenizerManager.generate_request", ("obj", "request")),
    Place(_TOKENIZER, "TokenizerManager.abort_request", ("rid", "abort_all")),
    Place(_TOKENIZER, "TokenizerManager.auto_create_handle_loop"),
    Place(_TOKENIZER, "TokenizerManager._init_req_state", ("obj", "request")),
    Place(_TOKENIZER, "TokenizerManager._send_one_request", ("tokenized_obj",)),
    Place(_TOKENIZER, "TokenizerManager._send_batch_request", ("tokenized_objs",)),
    Place(_TOKENIZER, "TokenizerManager._dispatch_to_scheduler"),
    Place(_TOKENIZER, "TokenizerManager.set_server_stop_hook", ("hook",)),
    Place(_TOKENIZER, "ReqState", ("finished", "output_ids", "obj", "dispatched", "abort_sent")),
    Place("sglang.srt.managers.io_struct", "ShutdownReq"),
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
            "attn_cp_rank",
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
        from pdserve.engine.cpu import hooks

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
        checks += [
            ("page copies, page_first_direct", page_first_copies_agree),
            ("page copies, layer_first", layer_first_copies_agree),
            ("extend attention", attention_agrees),
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


def page_first_copies_agree() -> bool:
    """Device to host to device through page_first_direct, other pages and slots untouched."""
    import torch
    from sglang.srt.mem_cache.pool_host import mha

    layers, page, heads, dim = 3, 4, 2, 5
    device = [torch.randn(6 * page, heads, dim) for _ in range(2 * layers)]
    host = [torch.zeros(7, layers, page, heads, dim) for _ in range(2)]
    source, stored = _slots([4, 1], page), _slots([2, 5], page)
    mha.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=device, dst_ptrs=host, src_indices=source, dst_indices=stored, page_size=page
    )
    restored = [torch.zeros(6 * page, heads, dim) for _ in range(2 * layers)]
    target = _slots([0, 3], page)
    for layer in range(layers):
        mha.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=host,
            dst_ptrs=[restored[layer], restored[layers + layer]],
            src_indices=stored,
            dst_indices=target,
            layer_id=layer,
            page_size=page,
        )
    untouched = all(bool((side[[0, 1, 3, 4, 6]] == 0).all()) for side in host)
    expected = all(
        bool((host[i // layers][2, i % layers] == device[i][4 * page : 5 * page]).all())
        for i in range(2 * layers)
    )
    return untouched and expected and _moved(device, restored, source, target)


def layer_first_copies_agree() -> bool:
    """Device to host to device through layer_first."""
    import torch
    from sglang.srt.mem_cache.pool_host import mha

    page = 4
    device = [torch.randn(6 * page, 2, 5) for _ in range(4)]
    host = [torch.zeros(8 * page, 2, 5) for _ in range(4)]
    restored = [torch.zeros(6 * page, 2, 5) for _ in range(4)]
    source, stored, target = _slots([5, 0], page), _slots([1, 6], page), _slots([2, 4], page)
    mha.transfer_kv_direct(
        src_layers=device, dst_layers=host, src_indices=source, dst_indices=stored, page_size=page
    )
    mha.transfer_kv_direct(
        src_layers=host, dst_layers=restored, src_indices=stored, dst_indices=target, page_size=page
    )
    return _moved(device, host, source, stored) and _moved(device, restored, source, target)


def _slots(pages: list[int], page_size: int) -> Any:
    import torch

    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


def _moved(source: list[Any], target: list[Any], source_slots: Any, target_slots: Any) -> bool:
    """Each target tensor holds the source's rows at its slots, and zeros elsewhere."""
    for before, after in zip(source, target, strict=True):
        rest = after.clone()
        rest[target_slots] = 0
        if bool((after[target_slots] != before[source_slots]).any()) or bool((rest != 0).any()):
            return False
    return True


def attention_agrees() -> bool:
    """Extend attention of a batch (cached prefixes of 0, 5 and 9 tokens, grouped heads) equals a plain
    softmax.
    """
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    heads, kv_heads, dim, window = 4, 2, 8, 3
    prefix, new = [0, 5, 9], [4, 1, 3]
    total = [p + n for p, n in zip(prefix, new, strict=True)]
    keys, values = torch.randn(40, kv_heads, dim), torch.randn(40, kv_heads, dim)
    table = torch.stack([torch.randperm(40)[: max(total)] for _ in total])
    query = torch.randn(sum(new), heads, dim)
    for sliding in (None, window):
        output = torch.empty_like(query)
        TorchNativeAttnBackend._run_sdpa_forward_extend(
            None,
            query,
            output,
            keys,
            values,
            table,
            torch.arange(len(total)),
            torch.tensor(total),
            torch.tensor(prefix),
            torch.tensor(new),
            scaling=1 / math.sqrt(dim),
            enable_gqa=True,
            causal=True,
            sliding_window_size=sliding,
        )
        if not torch.allclose(
            output, _plain_attention(query, keys, values, table, prefix, new, sliding), atol=1e-5
        ):
            return False
    return True


def _plain_attention(
    query: Any, keys: Any, values: Any, table: Any, prefix: list[int], new: list[int], window: int | None
) -> Any:
    import torch

    output, row = torch.empty_like(query), 0
    group = query.shape[1] // keys.shape[1]
    for request, (cached, added) in enumerate(zip(prefix, new, strict=True)):
        for position in range(cached, cached + added):
            first = 0 if window is None else max(0, position - window)
            slots = table[request, first : position + 1]
            for head in range(query.shape[1]):
                k, v = keys[slots, head // group], values[slots, head // group]
                weights = torch.softmax(k @ query[row, head] / math.sqrt(query.shape[2]), 0)
                output[row, head] = weights @ v
            row += 1
    return output
