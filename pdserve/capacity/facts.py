"""What is known of a machine, of a model, and of what the processes of a cluster want. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "agg", "elastic"]
Level = Literal["ok", "warn", "fail"]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `index`: NVML's, in the order of PCI addresses."""

    index: int
    memory_bytes: int
    name: str = "GPU"
    compute: str = ""
    """Compute capability, as in "9.0"; empty: not known."""
    numa_node: int | None = None

    @property
    def is_sm100(self) -> bool:
        """A Blackwell GPU of data centres (B200, B300), as SGLang's `is_sm100`."""
        return self.compute.startswith("10.")


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One RDMA device."""

    name: str
    numa_node: int | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host."""

    memory_bytes: int
    """All of it, or the limit of the container. What others use now counts too, so that a cluster that starts
    again gets the sizes that it had, and finds its pages.
    """
    shm_bytes: int
    """Size of /dev/shm."""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts tokens for a model. Fields as of `Model`."""

    name: str
    weight_bytes: int
    """Beside the model's; 0: in its files."""
    layers: int
    kv_heads: int
    token_values: int
    dtype_bytes: int
    is_packed: bool
    """Its layers lie in the model's pages, and have none of their own."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model, from its config.json and the sizes of its weight files."""

    name: str
    architecture: str
    weight_bytes: int
    layers: int
    """Layers with keys and values in the main pool."""
    kv_heads: int
    """0: latent attention (MLA), the same on all tensor-parallel ranks."""
    token_values: int
    """Numbers that a token takes in a layer: of one head, keys and values together; MLA: of the layer."""
    dtype_bytes: int
    """Of a number in the KV cache, where no option says otherwise."""
    context_tokens: int
    sliding_layers: int = 0
    """Layers that SGLang keeps in a pool of their own, for their window only."""
    other_layers: int = 0
    """Layers with a state instead of keys and values: Mamba, GDN."""
    has_indexer: bool = False
    """Sparse attention (DSA) with an index of its own."""
    mtp_layers: int = 0
    """Layers that draft tokens (MTP, NEXTN), in its files beside the others."""
    draft: Draft | None = None
    """What its workers draft with."""


class WorkerNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's table says. None, 0 and empty: the plan chooses."""

    name: str
    role: Role
    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Replicas with GPUs of their own (without attention data parallelism)."""
    attention_dp: int = 1
    """Data parallel groups within the `tp` ranks."""
    gpus: tuple[int, ...] | None = None
    page_size: int | None = None
    page_pieces: int = 0
    """Pieces that its pages are stored in; 0: one for each rank."""
    kv_cache_dtype: str = "auto"
    mem_fraction: float | None = None
    buffer_only: bool = False
    hicache_size_gb: int = 0
    hicache_ratio: float | None = None
    context_length: int | None = None
    has_storage: bool = True
    """Its pages go to host memory, and to the pool or another storage."""
    backends: tuple[str, ...] = ()
    """Attention backends that its flags name."""
    one_pool: bool = False
    """--disable-hybrid-swa-memory: sliding layers lie in the main pool."""
    draft_algorithm: str = ""
    """--speculative-algorithm; empty: none."""
    draft_path: str = ""
    draft_kv_cache_dtype: str = ""
    """Empty: as `kv_cache_dtype`."""

    @property
    def ranks(self) -> int:
        """Processes with a GPU each."""
        return self.tp * self.pp * self.dp


class PoolNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool node's table says. None: the plan chooses."""

    name: str
    capacity_bytes: int | None = None
    slab_bytes: int | None = None
    in_shm: bool = True
    """Its arena is a file in /dev/shm, which bounds it."""


class Note(msgspec.Struct, frozen=True):
    """Something that a person should know. `change`: what to do about it."""

    level: Level
    about: str
    says: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.about}: {self.says}" + (f": {self.change}" if self.change else "")


class WorkerFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker gets."""

    name: str
    gpus: tuple[int, ...]
    ranks: int
    has_storage: bool
    page_size: int
    page_bytes: int
    """Of one rank, in the largest part of a page."""
    draft_page_bytes: int
    """Of one rank, in the part of a page that a draft model has; 0: none, or it is in the page."""
    draft: str
    """What drafts tokens; empty: nothing."""
    device_tokens: int
    """About: SGLang decides when it has loaded the weights."""
    host_gb: int
    """Of one rank, 10^9 bytes; 0: no host memory, or by an explicit ratio."""
    host_bytes: int
    """Of one rank."""
    host_tokens: int
    """So much of a prompt is stored and fetched at most: all its pages lie in host memory together."""
    start_timeout_s: float
    release_s: float
    """What pinned memory adds to the end of its processes."""


class PoolFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool node gets."""

    name: str
    capacity_bytes: int
    slab_bytes: int


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes get."""

    machine: Machine
    workers: tuple[WorkerFit, ...]
    pools: tuple[PoolFit, ...]
    reserve_bytes: int
    """Left to the system and to the processes themselves."""
    notes: tuple[Note, ...] = ()
