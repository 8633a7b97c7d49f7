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

    model_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Hugging Face model directory, or a model of the pool: `pdserve://POOL/NAME[@REV]`.",
        ),
    ]
    served_model_name: Annotated[
        str, Meta(description="Name of the model for clients; empty: the directory's name.")
    ] = ""
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port to listen on.")] = 30000
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Device that runs the model; auto: a GPU if there is one."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="Data type of weights and activations; auto: the model's own, but float32 where a "
            "processor without bfloat16 instructions computes it. Workers that share pages need the same one."
        ),
    ] = "auto"
    page_size: Annotated[
        int, Meta(ge=1, description="Tokens per KV page; the same on all workers of a pool.")
    ] = 64
    max_total_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens in the device's KV cache; none: as SGLang's --mem-fraction-static allows, "
            "on CPU as many as fit into 1 GB, up to 40,000.",
        ),
    ] = None
    hicache_host_memory_mode: Annotated[
        HostMemoryMode,
        Meta(
            description="What host memory holds. cache: pages that the worker keeps, besides the pool's. "
            "buffer_only: pages on their way between device and pool, so that each lies on a host once."
        ),
    ] = "cache"
    hicache_ratio: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Size of the host's KV memory as a multiple of the device's; none: 2.0, for "
            "buffer_only 1.2, and on a GPU as much of that as host memory has room for."
        ),
    ] = None
    hicache_size_gb: Annotated[
        int,
        Meta(
            ge=0,
            description="Size of the host's KV memory in GB (10^9 bytes), of each rank; 0: by hicache_ratio, "
            "or on GPUs the rank's share of half of the host's memory.",
        ),
    ] = 0
    layout: Annotated[
        Layout,
        Meta(
            description="Layout of pages in host memory; the same on all workers of a pool. auto: "
            "page_first, on CPU page_first_direct."
        ),
    ] = "auto"
    page_pieces: Annotated[
        int,
        Meta(
            ge=0,
            description="Pieces that the pool stores the heads of a page in: the largest --tp-size of the "
            "workers that share pages. Those of smaller ones then share them too. Needs the layout "
            "page_head, which auto takes. 0: only workers of one --tp-size share pages.",
        ),
    ] = 0
    trusted_network: Annotated[
        bool,
        Meta(
            description="Only the hosts of this worker reach its ranks. Needed with --nnodes: these talk "
            "without a token, and whoever reaches their ports owns the worker."
        ),
    ] = False
    extra_args: Annotated[
        list[str], Meta(description="Flags passed to SGLang unchanged; they win over the options above.")
    ] = []


class ExactTurnsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Earlier answers in a chat's prompt keep the tokens that they were made of."""

    enabled: Annotated[
        bool,
        Meta(
            description="Earlier answers in a chat's prompt get the tokens that they were made of. false: "
            "their text is encoded anew, as plain SGLang does."
        ),
    ] = True
    lookup_s: Annotated[
        float,
        Meta(
            gt=0,
            le=2.0,
            description="Longest wait for the pool to give the tokens of earlier answers. Then their text is "
            "encoded.",
        ),
    ] = 0.1
