"""Findings from facts. Pure: each function is one check, a table of cases stands in tests/doctor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

from pdserve.doctor.facts import NO_UCX, Finding, Level, Machine, PoolNode, Probe, Turn, Worker
from pdserve.extras import how_to_install
from pdserve.router.fleet.registry import differing_field
from pdserve.router.fleet.worker import WorkerInfo

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
        yield from _state(worker)
    answered = [worker for worker in found if not worker.error]
    if all(worker.role for worker in answered):
        yield from _roles({worker.role for worker in answered})
    told = [(worker.url, worker.info) for worker in answered if worker.info is not None]
    for model in dict.fromkeys(info.model for _, info in told):
        yield from _alike(model, [(url, info) for url, info in told if info.model == model])
    for worker in answered:
        if abs(worker.clock_ahead_s) > MAX_CLOCK_S:
            says = f"{worker.url}: its clock is {worker.clock_ahead_s:+.1f} s off ours"
            yield _finding("clock", "warn", says, "run NTP on all hosts: logs and etcd leases rest on it")
    if answered and all(abs(worker.clock_ahead_s) <= MAX_CLOCK_S for worker in answered):
        yield _finding("clock", "ok", f"{len(answered)} workers agree with this clock")


def _state(worker: Worker) -> Iterator[Finding]:
    url, info = worker.url, worker.info
    if worker.error:
        yield _finding("worker", "fail", f"{url}: {worker.error}", "see its log; start it")
    elif worker.draining:
        says = f"{url} drains: it finishes what it has and takes nothing new"
        yield _finding("worker", "warn", says, "start it again where it is to stay")
    elif not worker.ready:
        says = f"{url} is not ready: it still starts, or SGLang in it is not well"
        yield _finding("worker", "fail", says, "wait, or see its log")
    if worker.refused:
        says = f"{url}: the router sends it nothing: {worker.refused}"
        yield _finding("worker", "fail", says, "change its settings, or the others'")
    if worker.guarded:
        says = (
            f"{url} was not asked more: it wants the cluster's token, which goes to workers of "
            "--config FILE or --worker URL alone"
        )
        yield _finding("worker", "ok", says)
    elif info is not None and info.lacks:
        says = f"{url} is {info.engine}'s: how it uses the pool is not known, and not probed"
        yield _finding("worker", "ok", says)
    elif info is not None and worker.pool != "up":
        says = f"{url} does not reach every pool node, or runs without the pool"
        yield _finding("pool", "warn", says, "start them, check pool.nodes and storage")


def _roles(roles: Set[str]) -> Iterator[Finding]:
    if roles and not roles & {"decode", "agg", "elastic"}:
        yield _finding("worker", "fail", "no decode, aggregated or elastic worker answers", "start one")
    if "prefill" in roles and not roles & {"decode", "elastic"}:
        yield _finding("worker", "warn", "prefill workers without a decode worker", "start a decode worker")


def _alike(model: str, there: Sequence[tuple[str, WorkerInfo]]) -> Iterator[Finding]:
    """What must be the same for workers to share pages, as the router sees it."""
    (first, own), *others = there
    differs = False
    for url, info in others:
        if (field := differing_field(own, info)) is not None:
            differs = True
            name, ours, theirs = field
            told = f"{str(ours)[:32]} at {first}, {str(theirs)[:32]} at {url}"
            says = f"workers of {model} differ in {name}: {told}"
            yield _finding("alike", "fail", says, "give all the same settings and files")
    if not differs:
        yield _finding("alike", "ok", f"the {len(there)} workers of {model} can share pages")
    versions = {f"pdserve {info.pdserve_version}, SGLang {info.sglang_version}" for _, info in there}
    if len(versions) > 1 and not differs:
        says = f"workers of {model} run {'; '.join(sorted(versions))}"
        yield _finding("versions", "warn", says, "upgrade all")


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
