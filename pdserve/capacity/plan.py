"""What each process of a cluster gets on a machine with GPUs, and what a person should know of it. Pure.

What cannot work raises ConfigError, or is a note of level "fail" where the rest is still worth to be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from pdserve.capacity.facts import (
    Fit,
    Gpu,
    Level,
    Machine,
    Model,
    Note,
    PoolFit,
    PoolNeed,
    WorkerFit,
    WorkerNeed,
)
from pdserve.capacity.gpus import assign
from pdserve.capacity.memory import GB, GIB, MIB, device_kv_bytes, divide, reserve_bytes, rounded
from pdserve.capacity.model import (
    DEFAULT_PAGE_TOKENS,
    WITH_SCALES,
    page_sizes,
    part_bytes,
    rank_weight_bytes,
    token_bytes,
)
from pdserve.errors import ConfigError

SLAB_BYTES: Final = 32 * MIB  # a pool node's own default
MAX_SLAB_BYTES: Final = 2 * GIB
DOCKER_SHM_BYTES: Final = 64 * MIB
_LESS: Final = "start fewer workers, or set engine.hicache_size_gb and capacity_bytes lower"
_ALIKE: Final = "set engine.page_pieces to the largest --tp-size, or give all one, and all one --pp-size"
_WIDER: Final = (2, 4, 8, 16)  # --tp-size that is proposed
_START_S: Final = 300.0
_IDLE_SHARE: Final = 0.2  # of host memory
_LOAD_BYTES_S: Final = 250 * MIB  # weights from a slow network disk
_PIN_BYTES_S: Final = GB  # pinned memory is cleared page by page
_UNPIN_BYTES_S: Final = 5 * GB


def make_fit(
    machine: Machine,
    workers: Sequence[WorkerNeed],
    models: Mapping[str, Model],
    pools: Sequence[PoolNeed],
) -> Fit:
    """`workers`: those that run on GPUs. `models`: by worker. Raises ConfigError."""
    gpus_of = assign(machine, workers)
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    gpus = {name: [by_index[index] for index in taken] for name, taken in gpus_of.items()}
    kv_bytes, needed = {}, {}
    for worker in workers:
        model = models[worker.name]
        kv_bytes[worker.name] = _kv_bytes(worker, model, gpus[worker.name], len(machine.gpus))
        longest = worker.context_length or model.context_tokens
        needed[worker.name] = min(longest * token_bytes(model, worker), kv_bytes[worker.name])
    hosts, arenas = divide(machine, workers, pools, kv_bytes, needed)
    sizes = {worker.name: _page_size(worker, models[worker.name], gpus[worker.name]) for worker in workers}
    fits = [
        _worker_fit(
            worker,
            models[worker.name],
            gpus_of[worker.name],
            sizes[worker.name],
            hosts[worker.name],
            kv_bytes[worker.name],
        )
        for worker in workers
    ]
    page_bytes = max((fit.page_bytes for fit in fits), default=0)
    notes = [
        *(note for worker in workers for note in _unsupported(worker, models[worker.name])),
        *_page_notes(workers, models, gpus, sizes),
        *(
            note
            for worker, fit in zip(workers, fits, strict=True)
            for note in _host_notes(worker, fit, models)
        ),
        *_tp_notes(workers, models),
        *(note for worker in workers for note in _untried(worker)),
        *(Note("fail", name, "no host memory is left for its pages", _LESS) for name in _empty(fits)),
        *_shm_notes(machine, pools, arenas),
        *_idle_notes(machine, pools, fits, arenas, reserve_bytes(machine, workers)),
    ]
    return Fit(
        machine=machine,
        workers=tuple(fits),
        pools=tuple(_pool_fit(pool, arenas[pool.name], page_bytes) for pool in pools),
        reserve_bytes=reserve_bytes(machine, workers),
        notes=tuple(_together(notes)),
    )


def release_s(pinned_bytes: int) -> float:
    """What so much pinned memory adds to the end of the processes that hold it."""
    return pinned_bytes / _UNPIN_BYTES_S


def _kv_bytes(worker: WorkerNeed, model: Model, gpus: Sequence[Gpu], there: int) -> int:
    """`there`: GPUs of the machine. Raises ConfigError where the weights leave no room."""
    if (found := _room(worker, model, gpus)) is not None:
        return found
    ranks = worker.tp * worker.pp
    wider = next((tp for tp in _WIDER if tp > worker.tp and _room(replace(worker, tp=tp), model, gpus)), None)
    change = "take a quantized model" if wider is None else f"set --tp-size {wider}"
    if wider is None or wider * worker.pp * worker.dp > there:
        change += f", which needs more than the {there} GPUs here" if wider else ", or larger GPUs"
    raise ConfigError(
        f"{worker.name}: {model.name} takes {rank_weight_bytes(model, worker) / GB:,.0f} GB of weights on "
        f"each of {ranks} GPUs, which leaves no room for KV in {gpus[0].memory_bytes / GB:,.0f} GB: {change}"
    )


def _room(worker: WorkerNeed, model: Model, gpus: Sequence[Gpu]) -> int | None:
    """Bytes for KV; None: too few for a page."""
    found = device_kv_bytes(gpus, model, worker)
    return found if found >= DEFAULT_PAGE_TOKENS * token_bytes(model, worker) else None


def _page_size(worker: WorkerNeed, model: Model, gpus: Sequence[Gpu]) -> int:
    """What SGLang will make of it."""
    allowed, _ = page_sizes(model, gpus[0], worker.backends)
    wanted = worker.page_size or DEFAULT_PAGE_TOKENS
    return wanted if not allowed or wanted in allowed else allowed[0]


def _worker_fit(
    worker: WorkerNeed, model: Model, gpus: tuple[int, ...], page_size: int, host_bytes: int, kv_bytes: int
) -> WorkerFit:
    per_token = token_bytes(model, worker)
    pinned = host_bytes * worker.ranks
    is_chosen = worker.has_storage and worker.hicache_ratio is None
    return WorkerFit(
        name=worker.name,
        gpus=gpus,
        ranks=worker.ranks,
        has_storage=worker.has_storage,
        page_size=page_size,
        page_bytes=page_size * max(part_bytes(model, worker)),
        draft_page_bytes=page_size * part_bytes(model, worker)[2],
        draft=model.draft.name if model.draft is not None else "",
        device_tokens=kv_bytes // per_token,
        host_gb=host_bytes // GB if is_chosen else 0,
        host_bytes=host_bytes,
        host_tokens=host_bytes // per_token,
        start_timeout_s=_START_S + _loaded_bytes(model) / _LOAD_BYTES_S + pinned / _PIN_BYTES_S,
        release_s=release_s(pinned),
    )


def _loaded_bytes(model: Model) -> int:
    return model.weight_bytes + (model.draft.weight_bytes if model.draft is not None else 0)


def _pool_fit(pool: PoolNeed, capacity_bytes: int, page_bytes: int) -> PoolFit:
    """Raises ConfigError where no slab holds a page."""
    slab = pool.slab_bytes or SLAB_BYTES
    while pool.slab_bytes is None and slab < page_bytes:
        slab *= 2
    if page_bytes > min(slab, MAX_SLAB_BYTES):
        raise ConfigError(
            f"{pool.name}: a page has {page_bytes / MIB:,.1f} MiB on each rank, and no slab of "
            f"{slab / MIB:,.0f} MiB holds it: raise slab_bytes, or lower engine.page_size"
        )
    return PoolFit(name=pool.name, capacity_bytes=capacity_bytes, slab_bytes=slab)


# --- notes


def _together(notes: Iterable[Note]) -> Iterator[Note]:
    """One note for all that it is about."""
    about: dict[tuple[Level, str, str], list[str]] = {}
    for note in notes:
        about.setdefault((note.level, note.says, note.change), []).append(note.about)
    for (level, says, change), names in about.items():
        yield Note(level, ", ".join(names), says, change)


def _empty(fits: Sequence[WorkerFit]) -> Iterator[str]:
    yield from (fit.name for fit in fits if fit.has_storage and not fit.host_bytes)


def _tp_notes(workers: Sequence[WorkerNeed], models: Mapping[str, Model]) -> Iterator[Note]:
    """What the router refuses: pages are stored by rank, or in pieces, and with drafts, all the same."""
    for model in {model.name: model for model in models.values()}.values():
        its = [one for one in workers if models[one.name].name == model.name and one.has_storage]
        drafting = {one.name: _drafting(one) for one in its}
        if len(set(drafting.values())) > 1:
            said = ", ".join(f"{name} {how or 'without'}" for name, how in drafting.items())
            says = f"workers that draft differently share no pages ({said})"
            yield Note("fail", model.name, says, "give all the same --speculative- flags")
        ranks = {(_pieces(worker) if model.kv_heads else 1, worker.pp) for worker in its}
        if len(ranks) > 1:
            said = ", ".join(f"{worker.name} tp {worker.tp} pp {worker.pp}" for worker in its)
            says = f"workers that divide the model differently cannot share pages ({said})"
            yield Note("fail", model.name, says, _ALIKE)


def _drafting(worker: WorkerNeed) -> str:
    """All of it decides the bytes of pages."""
    if not worker.draft_algorithm:
        return ""
    return " ".join(filter(None, (worker.draft_algorithm, worker.draft_path, worker.draft_kv_cache_dtype)))


def _pieces(worker: WorkerNeed) -> int:
    return worker.page_pieces or worker.tp // worker.attention_dp


def _untried(worker: WorkerNeed) -> Iterator[Note]:
    """What should work, and nobody has seen on a GPU."""
    if not worker.has_storage:
        return
    if worker.attention_dp > 1:
        says = "the pool with attention data parallelism is untested, and groups share no device memory"
        yield Note("warn", worker.name, says, "compare answers with those of plain SGLang")
    if worker.page_pieces:
        says = "engine.page_pieces is untested on GPUs"
        yield Note("warn", worker.name, says, "compare answers with those of plain SGLang")


def _unsupported(worker: WorkerNeed, model: Model) -> Iterator[Note]:
    """What the pool's backend refuses when SGLang has loaded the weights, or was never tried with."""
    if not worker.has_storage:
        return
    if worker.kv_cache_dtype in WITH_SCALES:
        says = f"SGLang stores no pages of KV type {worker.kv_cache_dtype}"
        yield Note("fail", worker.name, says, "take fp8_e4m3")
    change = 'compare its answers before you rely on them, or set storage = "none", which shares nothing'
    if model.sliding_layers and not model.layers and not worker.one_pool:
        says = f"all layers of {model.name} have a window, and SGLang then shares no pages"
        yield Note("fail", worker.name, says, "add --disable-hybrid-swa-memory")
    if model.other_layers:
        says = f"{model.name} has {model.other_layers} layers with a state, never seen in the pool by us"
        yield Note("warn", worker.name, says, change)
    if model.has_indexer:
        says = f"{model.name} has an index for sparse attention, never seen in the pool by us"
        yield Note("warn", worker.name, says, change)


def _page_notes(
    workers: Sequence[WorkerNeed],
    models: Mapping[str, Model],
    gpus: Mapping[str, Sequence[Gpu]],
    sizes: Mapping[str, int],
) -> Iterator[Note]:
    for worker in workers:
        size = sizes[worker.name]
        if size != (worker.page_size or DEFAULT_PAGE_TOKENS):
            why = page_sizes(models[worker.name], gpus[worker.name][0], worker.backends)[1]
            level: Level = "warn" if worker.page_size else "ok"
            change = f"set engine.page_size = {size}" if worker.page_size else ""
            yield Note(level, worker.name, f"pages have {size} tokens: {why}", change)
    for model in dict.fromkeys(models[worker.name].name for worker in workers):
        its = {worker.name: sizes[worker.name] for worker in workers if models[worker.name].name == model}
        if len(set(its.values())) > 1:
            said = ", ".join(f"{name} {size}" for name, size in its.items())
            change = "give all workers one attention backend and one engine.page_size"
            yield Note(
                "fail", model, f"workers cannot share pages of different sizes ({said} tokens)", change
            )


def _host_notes(worker: WorkerNeed, fit: WorkerFit, models: Mapping[str, Model]) -> Iterator[Note]:
    if not fit.host_bytes:
        return
    context = worker.context_length or models[worker.name].context_tokens
    longest = min(context, fit.device_tokens)
    if fit.device_tokens < context:
        says = f"the GPUs hold about {rounded(fit.device_tokens):,} tokens, and prompts may have {context:,}"
        change = "raise --tp-size, or lower engine.context_length"
        yield Note("warn", worker.name, says, change)
    if fit.host_tokens < longest:
        holds = f"{rounded(fit.host_tokens):,} tokens"
        says = f"of longer prompts {holds} pass through host memory, and the rest is computed each time"
        if worker.buffer_only:
            says = f"host memory has room for {holds} on their way, and a request may have {longest:,}"
        needed = -(-longest * token_bytes(models[worker.name], worker) // GB)
        change = f"set engine.hicache_size_gb = {needed} (for each rank), or lower engine.context_length"
        # SGLang stages a request's pages together, or not at all: such a worker refuses to start
        level: Level = "fail" if worker.buffer_only else "warn"
        yield Note(level, worker.name, says, change)


def _idle_notes(
    machine: Machine,
    pools: Sequence[PoolNeed],
    fits: Sequence[WorkerFit],
    arenas: Mapping[str, int],
    reserve: int,
) -> Iterator[Note]:
    """Much memory is left, because /dev/shm holds no larger arena."""
    chosen = [pool.name for pool in pools if pool.in_shm and pool.capacity_bytes is None]
    free = (
        machine.memory_bytes
        - reserve
        - sum(arenas.values())
        - sum(one.host_bytes * one.ranks for one in fits)
    )
    if chosen and machine.shm_bytes >= GIB and free > machine.memory_bytes * _IDLE_SHARE:
        says = (
            f"{free / GB:,.0f} GB of host memory stay free, since /dev/shm has {machine.shm_bytes / GB:,.0f}"
        )
        size = (machine.shm_bytes + free) // GIB
        yield Note(
            "ok", ", ".join(chosen), says, f"mount -o remount,size={size}g /dev/shm gives them to the pool"
        )


def _shm_notes(machine: Machine, pools: Sequence[PoolNeed], arenas: Mapping[str, int]) -> Iterator[Note]:
    inside = [pool for pool in pools if pool.in_shm]
    taken = sum(arenas[pool.name] for pool in inside)
    if inside and machine.shm_bytes >= GIB and taken < GIB * len(inside):
        names = ", ".join(pool.name for pool in inside)
        yield Note("fail", names, "no host memory is left for pages", _LESS)
        return
    if not inside or (taken <= machine.shm_bytes and machine.shm_bytes * 4 >= machine.memory_bytes):
        return
    has = (
        f"{machine.shm_bytes / MIB:,.0f} MiB"
        if machine.shm_bytes < GIB
        else f"{machine.shm_bytes / GIB:,.0f} GiB"
    )
    what = "a container's default" if machine.shm_bytes <= DOCKER_SHM_BYTES else "which bounds the pool"
    flag = f"--shm-size={machine.memory_bytes // 2 // GIB}g"
    change = f"start the container with {flag} (Kubernetes: an emptyDir of medium Memory there)"
    level: Level = "fail" if taken < GIB or taken > machine.shm_bytes else "warn"
    yield Note(level, "/dev/shm", f"it has {has}, {what}", change)
