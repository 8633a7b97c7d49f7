"""Configuration of the SGLang process of a worker."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Layout: TypeAlias = Literal["auto", "page_first_direct", "layer_first", "page_first", "page_head"]
Role: TypeAlias = Literal["prefill", "decode", "agg", "elastic"]
HostMemoryMode: TypeAlias = Literal["cache", "buffer_only"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker runs SGLang. What is not here is a flag of SGLang's, passed as it is (`extra_args`, or
    words after `--`).
    """

    model_path: Annotated[str, Meta(min_length=1)]
    """Hugging Face model directory, or a model of the pool: `pdserve://POOL/NAME[@REV]`."""
    served_model_name: str = ""
    """Name of the model for clients; empty: the directory's name."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 30000
    """Port to listen on."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that runs the model; auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; auto: the model's own, but float32 where a processor without
    bfloat16 instructions computes it. Workers that share pages need the same one.
    """
    page_size: Annotated[int, Meta(ge=1)] = 64
    """Tokens per KV page; the same on all workers of a pool."""
    max_total_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens in the device's KV cache; none: as SGLang's --mem-fraction-static allows, on CPU as many as fit
    into 1 GB, up to 40,000.
    """
    hicache_host_memory_mode: HostMemoryMode = "cache"
    """What host memory holds. cache: pages that the worker keeps, besides the pool's. buffer_only: pages on
    their way between device and pool, so that each lies on a host once.
    """
    hicache_ratio: Annotated[float, Meta(gt=0)] | None = None
    """Size of the host's KV memory as a multiple of the device's; none: 2.0, for buffer_only 1.2, and on a
    GPU as much of that as host memory has room for.
    """
    hicache_size_gb: Annotated[int, Meta(ge=0)] = 0
    """Size of the host's KV memory in GB (10^9 bytes), of each rank; 0: by hicache_ratio, or on GPUs the
    rank's share of half of the host's memory.
    """
    layout: Layout = "auto"
    """Layout of pages in host memory; the same on all workers of a pool. auto: page_first, on CPU
    page_first_direct.
    """
    page_pieces: Annotated[int, Meta(ge=0)] = 0
    """Pieces that the pool stores the heads of a page in: the largest --tp-size of the workers that share
    pages. Those of smaller ones then share them too. Needs the layout page_head, which auto takes. 0: only
    workers of one --tp-size share pages.
    """
    trusted_network: bool = False
    """Only the hosts of this worker reach its ranks. Needed with --nnodes: these talk without a token, and
    whoever reaches their ports owns the worker.
    """
    extra_args: list[str] = []
    """Flags passed to SGLang unchanged; they win over the options above."""


class ExactTurnsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Earlier answers in a chat's prompt keep the tokens that they were made of."""

    enabled: bool = True
    """Earlier answers in a chat's prompt get the tokens that they were made of. false: their text is encoded
    anew, as plain SGLang does.
    """
    lookup_s: Annotated[float, Meta(gt=0, le=2.0)] = 0.1
    """Longest wait for the pool to give the tokens of earlier answers. Then their text is encoded."""
