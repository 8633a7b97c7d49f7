"""Every attribute of SGLang that is replaced on a machine without an accelerator, as one table."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.engine.sglang.cpu import attention, replacements

HOST_POOL_BASE = "sglang.srt.mem_cache.pool_host.base"
SENDER = "sglang.srt.disaggregation.mooncake.conn"
SCHEDULER = "sglang.srt.managers.scheduler"
NCCL_LIBRARY = "sglang.srt.distributed.device_communicators.pynccl_wrapper"
LATENT_ATTENTION = "sglang.srt.models.deepseek_common.attention_backend_handler"
HASH_USER = "sglang.srt.mem_cache.utils"
LORA_BACKEND = "sglang.srt.lora.backend.torch_backend"
LORA_LAYERS = "sglang.srt.lora.layers"
ATTENTION_BACKEND = "sglang.srt.layers.attention.torch_native_backend"

_REST_S = 0.001  # little beside what moving a batch of pages takes
_HOST_MEMORY_RESERVE_BYTES = 1024**3
_MARK = "__pdserve_cpu__"


@dataclass(frozen=True)
class Hook:
    """One attribute of SGLang that is replaced.

    `attribute` may be dotted (class and method). `replace` maps the original to what takes its place; the
    original is None where SGLang imports it only with CUDA.
    """

    module: str
    attribute: str
    replace: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"

    def owner(self) -> tuple[Any, str]:
        """(object that holds the attribute, attribute's last name); raises ImportError or AttributeError."""
        owner: Any = importlib.import_module(self.module)
        *path, last = self.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, last


def _unpinned(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        init(self, *args, **kwargs)

    return without_pinning


def _resting(on_idle: Callable[[Any], None]) -> Callable[[Any], None]:
    """While pages move and nothing can be computed, SGLang's scheduler polls without a pause. Here the
    threads that move the pages, and the other workers, need that core.
    """

    @functools.wraps(on_idle)
    def idle(scheduler: Any) -> None:
        on_idle(scheduler)
        if not scheduler.is_fully_idle():
            time.sleep(_REST_S)

    return idle


def _publishing(stash_chunked_request: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A chunk's pages go to the pool while the next chunk is computed. SGLang submits their copy to host
    memory after it has launched the next chunk. On a GPU a launch returns at once; here it returns when that
    chunk has been computed.
    """

    @functools.wraps(stash_chunked_request)
    def stash(scheduler: Any, req: Any) -> None:
        stash_chunked_request(scheduler, req)
        scheduler.tree_cache.check_hicache_events()  # copies, and as copies are done at once here, stores

    return stash


def _without_nccl(_init: Callable[..., None]) -> Callable[..., None]:
    """Torch's ordinary wheel brings NCCL. SGLang 0.5.23 takes it between ranks wherever it can be loaded, and
    then asks for a CUDA device. Where it cannot, SGLang takes gloo.
    """

    def no_library(_self: Any, so_file: str | None = None) -> None:
        raise OSError("NCCL is not used on a machine without an accelerator")

    return no_library


def _absorbed(get_handler: Callable[[str], Any]) -> Callable[[str], Any]:
    """Latent attention (MLA) with torch's own attention reads latent vectors from the cache, new tokens' too.
    SGLang 0.5.23 would use the method of Triton, which has keys of new tokens in another form.
    """
    absorbed = importlib.import_module(LATENT_ATTENTION).AttnForwardMethod.MLA

    @functools.wraps(get_handler)
    def handler_of(backend_name: str) -> Any:
        if backend_name == "torch_native":
            return lambda _attention, _batch: absorbed
        return get_handler(backend_name)

    return handler_of


def _always(replacement: Callable[..., None]) -> Callable[[Any], Callable[..., None]]:
    return lambda _original: replacement


DIRECT_COPIES = (
    replacements.transfer_kv_direct,
    replacements.transfer_kv_per_layer_direct_pf_lf,
    replacements.transfer_kv_all_layer_direct_lf_pf,
)
COPIES = {
    "sglang.srt.mem_cache.pool_host.mha": (
        *DIRECT_COPIES,
        replacements.transfer_kv_per_layer_ph_lf,
        replacements.transfer_kv_all_layer_lf_ph,
    ),
    "sglang.srt.mem_cache.pool_host.mla": DIRECT_COPIES,
}
HOOKS: tuple[Hook, ...] = (
    *(Hook(pool, copy.__name__, _always(copy)) for pool, used in COPIES.items() for copy in used),
    Hook(HOST_POOL_BASE, "HostKVCache.__init__", _unpinned),
    Hook(HOST_POOL_BASE, "HICACHE_HOST_MEMORY_RESERVE_BYTES", lambda _: _HOST_MEMORY_RESERVE_BYTES),
    Hook(HASH_USER, "get_native_hash", lambda _: replacements.get_native_hash),
    Hook(
        ATTENTION_BACKEND,
        "TorchNativeAttnBackend._run_sdpa_forward_extend",
        attention.extend_new_queries_only,
    ),
    Hook(ATTENTION_BACKEND, "TorchNativeAttnBackend._run_sdpa_forward_decode", attention.decode_in_groups),
)
SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(SENDER, "MooncakeKVSender.supports_host_tensor_indices", lambda _: False),
    Hook(LATENT_ATTENTION, "AttentionBackendRegistry.get_handler", _absorbed),
    Hook(NCCL_LIBRARY, "NCCLLibrary.__init__", _without_nccl),
    Hook(SCHEDULER, "Scheduler.on_idle", _resting),
    Hook(SCHEDULER, "Scheduler.stash_chunked_request", _publishing),
    Hook(LORA_BACKEND, "torch", replacements.UnpinnedTorch),
    Hook(LORA_LAYERS, "torch", replacements.UnpinnedTorch),
    Hook("torch", "Tensor.pin_memory", lambda _: replacements.pin_memory),
)
"""For the scheduler's process alone: others need not import it."""


def apply(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Put these hooks in place in this process; again is a no-op.

    Raises ImportError or AttributeError when this SGLang lacks one.
    """
    replacements.declare_operators()
    setattr(torch.cpu, "Event", replacements.Event)  # noqa: B010  a class is replaced, which types do not allow
    setattr(torch.cpu, "Stream", replacements.Stream)  # noqa: B010
    for hook in hooks:
        owner, last = hook.owner()
        original = getattr(owner, last, None)
        if getattr(original, _MARK, False) or (not callable(original) and original == hook.replace(original)):
            continue
        replacement = hook.replace(original)
        if callable(replacement):
            setattr(replacement, _MARK, True)
        elif original is None:
            raise AttributeError(f"{hook.name} (not there)")
        setattr(owner, last, replacement)
