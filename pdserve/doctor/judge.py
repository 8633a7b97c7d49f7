"""Findings from facts. Pure: each function is one check, a table of cases stands in tests/doctor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pdserve.doctor.facts import NO_UCX, Finding, Level, Machine, PoolNode, Probe, Turn, Worker
from pdserve.extras import how_to_install

MIN_OPEN_FILES: Final = 4096
GOOD_OPEN_FILES: Final = 16_384
MAX_CLOCK_S: Final = 2.0
# Words of the router's plan.
PREFILLED: Final = ("stage=ok", "stage=partial")
NO_PREFILL_WORKER: Final = ("prefill=none-ready", "prefill=session-worker-gone")


def status(findings: Iterable[Finding]) -> int:
    """The exit status: 0 nothing to change, 1 warnings, 2 something does not work."""
    levels = {finding.level for finding in findings}
    return 2 if "fail" in levels else 1 if "warn" in levels else 0


def _finding(check: str, level: Level, says: str, change: str = "") -> Finding:
    return Finding(check, level, says, "" if level == "ok" else change)


# --- the machine


def machine(facts: Machine) -> Iterator[Finding]:
    """What this machine has and lacks."""
    yield _sglang(facts)
    yield from _numa(facts)
    yield _open_files(facts.open_files)
    yield _shm(facts)
    yield _ucx(facts)


def _sglang(facts: Machine) -> Finding:
    if not facts.sglang:
        says = "SGLang is not installed: no workers run here"
        return _finding("sglang", "warn", says, how_to_install("sglang"))
    if facts.sglang_misfit:
        return _finding("sglang", "fail", facts.sglang_misfit, f"install sglang=={facts.sglang_tested}")
    if facts.sglang != facts.sglang_tested:
        change = f"install sglang=={facts.sglang_tested}"
        return _finding(
            "sglang", "warn", f"SGLang {facts.sglang}; pdserve is tested with {facts.sglang_tested}", change
        )
    return _finding("sglang", "ok", f"SGLang {facts.sglang}")


def _numa(facts: Machine) -> Iterator[Finding]:
    if facts.has_gpu and facts.numa_nodes > 1 and not facts.has_numactl:
        says = f"{facts.numa_nodes} NUMA nodes, and no numactl: SGLang keeps no worker near its GPU"
        yield _finding("NUMA", "warn", says, "install numactl (on Debian: apt-get install numactl)")


def _open_files(limit: int) -> Finding:
    level: Level = "ok" if limit >= GOOD_OPEN_FILES else "warn" if limit >= MIN_OPEN_FILES else "fail"
    change = f"raise the limit to {GOOD_OPEN_FILES} (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
    return _finding("open files", level, f"a process may open {limit}", change)


def _shm(facts: Machine) -> Finding:
    says = f"/dev/shm has {_size(facts.shm_free_bytes)} free of {_size(facts.shm_bytes)}"
    if facts.shm_free_bytes < facts.shm_bytes // 10:
        return _finding("/dev/shm", "warn", says, "free what nobody uses there; SGLang needs some too")
    return _finding("/dev/shm", "ok", says)


def _ucx(facts: Machine) -> Finding:
    """What moves pages between hosts."""
    if facts.ucx_error:
        change = f"{how_to_install('ucx')}; without it pages go between hosts by TCP"
        return _finding("UCX", "warn" if facts.ucx_error == NO_UCX else "fail", facts.ucx_error, change)
    network = "over RDMA devices of this host" if facts.has_infiniband else "over TCP: no RDMA device is here"
    return _finding("UCX", "ok", f"it moves pages between hosts where ucx.trusted_network is set, {network}")


# --- the cluster


def workers(found: Sequence[Worker]) -> Iterator[Finding]:
    """Of a cluster's workers together."""
    for worker in found:
        if worker.error:
            yield _finding("worker", "fail", f"{worker.url}: {worker.error}", "see its log; start it")
        elif worker.draining:
            says = f"{worker.url} drains: it finishes what it has and takes nothing new"
            yield _finding("worker", "warn", says, "start it again where it is to stay")
        elif not worker.ready:
            says = f"{worker.url} is not ready: it still starts, or SGLang in it is not well"
            yield _finding("worker", "fail", says, "wait, or see its log")
        if worker.guarded:
            says = (
                f"{worker.url} was not asked more: it wants the cluster's token, which goes to workers of "
                "--config FILE or --worker URL alone"
            )
            yield _finding("worker", "ok", says)
        if worker.busy:
            says = f"{worker.url} is busy: it did not tell SGLang's arguments in time"
            yield _finding("worker", "warn", says, "ask again when it has less to do")
        if worker.engine and not worker.error:
            says = f"{worker.url} is {worker.engine}'s: how it uses the pool is not known, and not probed"
            yield _finding("worker", "ok", says)
    answered = [worker for worker in found if not worker.error]
    if all(worker.role or (worker.described and not worker.engine) for worker in answered):
        yield from _roles(found)
    described = [worker for worker in answered if worker.described]
    there = [worker for worker in described if not worker.engine]
    for model in dict.fromkeys(worker.model for worker in described):
        yield from _one_engine(model, [worker for worker in described if worker.model == model])
        yield from _alike(model, [worker for worker in there if worker.model == model])
    for worker in there:
        if not worker.busy:
            yield from _hand_off(worker)
            yield from _host_pool(worker)
    for worker in answered:
        if abs(worker.clock_ahead_s) > MAX_CLOCK_S:
            says = f"{worker.url}: its clock is {worker.clock_ahead_s:+.1f} s off ours"
            yield _finding("clock", "warn", says, "run NTP on all hosts: logs and etcd leases rest on it")
    if answered and all(abs(worker.clock_ahead_s) <= MAX_CLOCK_S for worker in answered):
        yield _finding("clock", "ok", f"{len(answered)} workers agree with this clock")


def _roles(found: Sequence[Worker]) -> Iterator[Finding]:
    roles = {worker.role for worker in found if not worker.error}
    if found and not roles & {"decode", "agg", "elastic"}:
        yield _finding("worker", "fail", "no decode, aggregated or elastic worker answers", "start one")
    if "prefill" in roles and not roles & {"decode", "elastic"}:
        yield _finding("worker", "warn", "prefill workers without a decode worker", "start a decode worker")


_ALIKE: Final = (
    ("page size", "page_size", "start all with one engine.page_size"),
    ("layout", "layout", "start all with one engine.layout"),
    ("ranks", "tp_size", "start all with one --tp-size, or with one engine.page_pieces"),
    ("KV dtype", "kv_dtype", "start all with one --kv-cache-dtype and engine.dtype"),
    ("model revision", "model", "give all the same files: their weights or configuration differ"),
    ("tokenizer", "tokenizer", "give all the same tokenizer files: prompts become other tokens"),
    ("chat template", "chat_template", "give all the same chat template: prompts become other tokens"),
    ("namespace", "namespace", "leave pool.namespace empty, or give all the same one"),
)


def _one_engine(model: str, there: Sequence[Worker]) -> Iterator[Finding]:
    engines = sorted({worker.engine or "sglang" for worker in there})
    if len(engines) > 1:
        says = f"workers of {model} are of {' and '.join(engines)}: they share no pages"
        yield _finding("engine", "fail", says, "give each engine's model a name of its own")


def _alike(model: str, there: Sequence[Worker]) -> Iterator[Finding]:
    """What must be the same for workers to share pages."""
    for check, field, change in _ALIKE:
        values: dict[str, list[str]] = {}
        for worker in there:
            own = getattr(worker, field, None) if field != "model" else None
            values.setdefault(str(own or worker.geometry.get(field, "")), []).append(worker.url)
        silent = values.pop("", [])
        if len(values) > 1:
            told = "; ".join(f"{value[:16]} at {', '.join(urls)}" for value, urls in values.items())
            yield _finding(check, "fail", f"workers of {model} differ: {told}", change)
        if silent and len(there) > 1:
            says = f"workers of {model} that do not tell theirs: {', '.join(silent)}"
            yield _finding(check, "warn", says, "upgrade them: whether theirs is the others' is not known")
        elif len(values) == 1:
            yield _finding(check, "ok", f"{next(iter(values))[:40]} at all {len(there)} workers of {model}")
    versions = {worker.versions for worker in there}
    if len(versions) > 1:
        yield _finding(
            "versions", "warn", f"workers of {model} run {', '.join(sorted(versions))}", "upgrade all"
        )


def _hand_off(worker: Worker) -> Iterator[Finding]:
    """Whether pages get from this worker to the others, and from them here."""
    url = worker.url
    if not worker.has_storage:
        says = f"{url} runs without the pool: nothing is shared"
        yield _finding("storage", "warn", says, 'set storage = "pool"')
        return
    if worker.pool != "up":
        yield _finding(
            "pool", "fail", f"{url} does not reach every pool node", "start them, check pool.nodes"
        )
    if not worker.radix_cache:
        says = f"{url}: SGLang's radix cache is off"
        yield _finding("radix cache", "fail", says, "remove --disable-radix-cache")
    if worker.prefetch_policy != "wait_complete":
        level: Level = "fail" if worker.prefetch_policy == "best_effort" else "warn"
        says = (
            f"{url}: prefetch policy {worker.prefetch_policy or 'unknown'}: pages on their way are recomputed"
        )
        yield _finding("prefetch", level, says, "use --hicache-storage-prefetch-policy wait_complete")
    elif worker.prefetch_threshold >= worker.context_length > 0:
        says = f"{url}: prefetch threshold {worker.prefetch_threshold} is the whole context: no hand-off ever"
        yield _finding("prefetch", "fail", says, "set prefetch_threshold to the page size")
    elif worker.prefetch_threshold > worker.page_size:
        says = f"{url}: prompts with fewer than {worker.prefetch_threshold} tokens to fetch are recomputed"
        yield _finding(
            "prefetch", "warn", says, f"set prefetch_threshold to the page size, {worker.page_size}"
        )
    else:
        yield _finding("prefetch", "ok", f"{url}: wait_complete from {worker.prefetch_threshold} tokens on")
    if worker.write_policy != "write_through":
        says = f"{url}: write policy {worker.write_policy or 'unknown'}: pages reach the pool late or never"
        yield _finding("write policy", "fail", says, "use --hicache-write-policy write_through")
    else:
        yield _finding("write policy", "ok", f"{url}: write_through")


def _host_pool(worker: Worker) -> Iterator[Finding]:
    if not worker.has_storage or not worker.host_tokens:
        return
    says = (
        f"{worker.url}: host memory for {worker.host_tokens:,} tokens, prompts to {worker.context_length:,}"
    )
    change = "raise engine.hicache_size_gb or hicache_ratio, or lower --context-length"
    # a request that the device has no room for is refused, however long the model lets it be
    longest = (
        worker.context_length if worker.keeps_host_pages else min(worker.context_length, worker.device_tokens)
    )
    if worker.host_tokens < longest:
        yield _finding("host pool", "fail", says, change)
    elif worker.keeps_host_pages and worker.host_tokens < worker.device_tokens:
        yield _finding("host pool", "warn", f"{says}; the device's has {worker.device_tokens:,}", change)
    else:
        yield _finding("host pool", "ok", says)


def pool(nodes: Sequence[PoolNode]) -> Iterator[Finding]:
    """Of the pool's nodes together."""
    for node in nodes:
        if node.error:
            yield _finding("pool node", "fail", f"{node.address}: {node.error}", "start it, or see its log")
    there = [node for node in nodes if not node.error]
    for node in there:
        if node.dead_members:
            says = f"{node.node} takes {', '.join(node.dead_members)} for dead"
            yield _finding(
                "pool node", "warn", says, "start them again, or let them leave (pdserve pool drain)"
            )
        if node.full_namespaces:
            says = f"{node.node}: quota used up in {', '.join(node.full_namespaces)}"
            yield _finding("quota", "warn", says, "raise it (pdserve pool ns set), where hits are lost by it")
        if node.unwritable_tiers:
            says = f"{node.node}: writing fails to tier {', '.join(node.unwritable_tiers)}"
            yield _finding("tier", "fail", says, "free space there, or see the node's log")
        if node.tail_bytes > node.capacity_bytes // 10:
            says = f"{node.node}: pages leave {_size(node.tail_bytes)} of {_size(node.capacity_bytes)} unused"
            change = "set its page_bytes to the size of the largest pages; it then starts empty"
            yield _finding("pool memory", "warn", says, change)
        used_up = node.free_bytes - node.tail_bytes < node.capacity_bytes // 20
        if node.capacity_bytes and used_up and node.evictions:
            says = f"{node.node} is full and has evicted {node.evictions:,} pages"
            yield _finding("pool memory", "warn", says, "raise capacity_bytes, add a node or an SSD tier")
    epochs = {node.epoch for node in there}
    if len(epochs) > 1:
        says = f"nodes have different views of the pool (epochs {', '.join(map(str, sorted(epochs)))})"
        yield _finding("pool node", "warn", says, "ask again in a few seconds; then check cluster.peers")
    elif there and not any(node.error for node in nodes):
        free = sum(node.free_bytes for node in there)
        yield _finding("pool node", "ok", f"{len(there)} answer, {_size(free)} free")


# --- the live probe


def probe(found: Probe) -> Iterator[Finding]:
    """One prompt of a model through prefill, pool and decode, and back with the next turn."""
    if found.error:
        yield _finding("live probe", "fail", found.error, "see the router's log")
        return
    first, second = found.turns
    pages = (first.prompt_tokens - 1) // found.page_size * found.page_size
    got = first.decode.get("pool", 0)
    says = f"{found.model}: turn 1, {_told(first)}"
    if skipped := _skipped_stage(first):
        yield _without_prefill(says, skipped)
    elif first.prefill is None:
        yield _finding("live probe", "ok", f"{says} (no prefill stage: {first.plan})")
    elif got < pages:
        change = "see the findings above, the workers' logs, and stage= in the plan: " + first.plan
        yield _finding("live probe", "fail", f"{says}: {pages} were to come from the pool", change)
    else:
        yield _finding("live probe", "ok", says)
    known = second.prefill if second.prefill is not None else second.decode
    reused = sum(count for tier, count in known.items() if tier != "computed")
    says = f"{found.model}: turn 2, {_told(second)}"
    if skipped := _skipped_stage(second):
        yield _without_prefill(says, skipped)
    elif reused < pages:
        yield _finding(
            "live probe", "fail", f"{says}: turn 1's {pages} tokens were not found again", "see above"
        )
    elif second.prefill is not None and reused < pages + found.page_size:
        change = "the answer's pages were not written back in time: see deadlines.settle_s"
        yield _finding("live probe", "warn", f"{says}: the answer was computed again", change)
    else:
        yield _finding("live probe", "ok", says)


def _skipped_stage(turn: Turn) -> str:
    """The plan's word for a prefill stage that was to be and was not; empty: all is as planned."""
    if turn.prefill is not None:
        return ""
    for word in turn.plan.split(", "):
        if word in NO_PREFILL_WORKER or (word.startswith("stage=") and word not in PREFILLED):
            return word
    return ""


def _without_prefill(says: str, word: str) -> Finding:
    """The decode worker computed the prompt itself, which it was not to do."""
    if word in NO_PREFILL_WORKER:
        change = "see the findings above, and at the router's /ready who is not ready, refused or draining"
    else:
        change = "see the logs of the prefill workers and of the router"
    return _finding("live probe", "fail", f"{says}: no prefill worker computed it ({word})", change)


def _told(turn: Turn) -> str:
    def of(tiers: dict[str, int]) -> str:
        return " + ".join(f"{count} {tier}" for tier, count in tiers.items() if count) or "nothing"

    stage = "" if turn.prefill is None else f"prefill: {of(turn.prefill)}; "
    return f"{turn.prompt_tokens} tokens in {turn.seconds:.2f} s: {stage}decode: {of(turn.decode)}"


def _size(size_bytes: float) -> str:
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"
