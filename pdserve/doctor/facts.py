"""What is known of a machine and of a cluster. Pure: no judgement, no gathering."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pdserve.router.fleet.worker import WorkerInfo

Level = Literal["ok", "warn", "fail"]
NO_UCX: Final = "UCX is not installed"


class Finding(msgspec.Struct, frozen=True):
    """What one check found. `change`: what to do about it; empty where all is well."""

    check: str
    level: Level
    says: str
    change: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, and what is installed on it."""

    open_files: int
    """Hard limit of open files; what processes raise theirs to."""
    shm_bytes: int
    shm_free_bytes: int
    sglang: str = ""
    """Version; empty: not installed."""
    sglang_tested: str = ""
    sglang_misfit: str = ""
    """What pdserve needs of it and does not find; empty: nothing, or not checked."""
    ucx_error: str = ""
    """Why UCX cannot be used; empty: it can."""
    has_infiniband: bool = False


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a cluster, by its own word: `/pd/ready` and `/pd/info`."""

    url: str
    error: str = ""
    """Why it says nothing."""
    ready: bool = False
    draining: bool = False
    guarded: bool = False
    """It wants the cluster's token before it tells more, and was not sent it."""
    refused: str = ""
    """Why the router sends it nothing; empty: it does."""
    pool: str = "down"
    role: str = ""
    """Empty: not known."""
    info: WorkerInfo | None = None
    """None: it did not tell what it serves; one that starts or stops may not."""
    clock_ahead_s: float = 0.0


class PoolNode(msgspec.Struct, frozen=True, kw_only=True):
    """One pool node."""

    address: str
    error: str = ""
    node: str = ""
    epoch: int = 0
    capacity_bytes: int = 0
    free_bytes: int = 0
    tail_bytes: int = 0
    """Of those free: remainders of slabs, which no page of the slab's size fits."""
    evictions: int = 0
    dead_members: tuple[str, ...] = ()
    full_namespaces: tuple[str, ...] = ()
    """Those whose quota is used up by 95 % and more."""
    unwritable_tiers: tuple[str, ...] = ()


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the live probe. Tokens of the prompt, by where a worker had them from."""

    prompt_tokens: int
    prefill: dict[str, int] | None = None
    """None: no prefill stage."""
    decode: dict[str, int] = {}
    plan: str = ""
    seconds: float = 0.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that nobody had, and the next turn of its conversation."""

    error: str = ""
    model: str = ""
    page_size: int = 0
    turns: tuple[Turn, ...] = ()
