"""The processes that the end-to-end tests share."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.e2e import warm
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, free_port
from tests.support.e2e.draft_model import make_mtp_model
from tests.support.e2e.hybrid_model import make_hybrid_model
from tests.support.e2e.latent_model import make_latent_model
from tests.support.e2e.prompts import NEW_TOKENS, Answer, first_turns, second_turn
from tests.support.e2e.servers import Servers
from tests.support.etcd_server import EtcdServer

CHUNK_TOKENS: Final = 512
STAGED: Final = {
    "hicache_host_memory_mode": "buffer_only",
    "max_total_tokens": 6_000,
    "hicache_ratio": 0.8,
}
"""Host memory is for 4,800 tokens, requests have up to 4,096, and the prompts of `first_turns` 11,000."""
POOL_EVENTS: Final = "aggpool.events"  # sockets in the run directory
WORKER_EVENTS: Final = "agg.events"
PAGE_KEY: Final = "of-the-workers-of-this-run-alone"
PULL_AHEAD: Final = {"pull_ahead_tokens": 2 * CHUNK_TOKENS}
NEEDS: Final = {
    "warm_server": (),
    "ucx_worker": ("ucx",),
    "plain_worker": ("plain",),
    "agg_worker": ("agg",),
    "latent": ("latent",),
    "embedder": ("embedder",),
    "replicas": ("replicas",),
    "drafts": ("drafted", "mtp-prefill", "mtp-decode"),
    "ranks": ("ranks-prefill", "ranks-decode", "ranks-one"),
    "beside_plain": ("plain", "agg", "prefill0", "decode0"),
    "cluster": ("prefill0", "decode0", "prefill1", "decode1"),
    "elastic_workers": ("elastic0", "elastic1"),
    "hybrid": ("hybrid-prefill", "hybrid-decode"),
    "direct": ("sender", "receiver", "decode0"),
}
"""The servers that a test needs which asks for one of these fixtures. Tests that need none come first, then
those of each line: so most servers start once.
"""


def place(fixtures: Collection[str]) -> int:
    """Where a test that asks for these fixtures stands in the order of all."""
    return max((i for i, fixture in enumerate(NEEDS, 1) if fixture in fixtures), default=0)


def engine_settings(
    model: Path, context_length: int = 4096, extra_args: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Engine settings that every test worker shares; float32, since exact tokens are compared."""
    return {
        "model_path": model,
        "served_model_name": "demo-tiny",
        "dtype": "float32",
        "page_size": 64,
        "max_total_tokens": 40000,
        "extra_args": ["--context-length", str(context_length), *extra_args],
        **more,
    }


@dataclass(frozen=True)
class Reference:
    """What plain SGLang, without HiCache and pool, answers."""

    prompts: list[list[int]]
    first: list[Answer]
    second_prompts: list[list[int]]
    second: list[Answer]

    @classmethod
    def of(cls, plain: Worker, lengths: Sequence[int]) -> Reference:
        """Of prompts of these lengths, each computed whole."""
        prompts = first_turns(lengths)
        first = ask_cold(plain, prompts)
        second_prompts = [second_turn(p, a, i) for i, (p, a) in enumerate(zip(prompts, first, strict=True))]
        return cls(prompts, first, second_prompts, ask_cold(plain, second_prompts))

    def longest(self, under: int) -> tuple[list[int], Answer]:
        """The longest prompt of fewer tokens, and its answer."""
        pairs = zip(self.prompts, self.first, strict=True)
        return max((pair for pair in pairs if len(pair[0]) < under), key=lambda pair: len(pair[0]))


def ask_all(worker: Worker, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers one after the other, straight from a worker."""
    return [Answer.of(worker.generate(prompt, NEW_TOKENS)) for prompt in prompts]


def ask_cold(worker: Worker, prompts: list[list[int]]) -> list[Answer]:
    """The same, each computed whole: it has a salt that no page was stored with."""
    answers = []
    for prompt in prompts:
        body = worker.generate(prompt, NEW_TOKENS, cache_salt=uuid.uuid4().hex)
        assert body["meta_info"]["cached_tokens"] == 0
        answers.append(Answer.of(body))
    return answers


@dataclass
class Cluster:
    """Two disaggregated pairs on one pool node, each pair behind its own router and both behind a third. The
    first pair computes prompts in chunks, and pulls long ones ahead. The second pair keeps no pages in host
    memory (`buffer_only`).
    """

    pool: PoolNode
    prefill: list[Worker]
    decode: list[Worker]
    pairs: list[Router]
    router: Router

    @classmethod
    def of(cls, run_dir: Path, servers: Servers, pool: PoolNode) -> Cluster:
        prefill, decode = (
            [servers.workers[f"{role}{i}"] for i in range(2)] for role in ("prefill", "decode")
        )
        pairs = [
            Router(run_dir, prefill=[prefill[0]], decode=[decode[0]], name="router-pair0", extra=PULL_AHEAD),
            Router(run_dir, prefill=[prefill[1]], decode=[decode[1]], name="router-pair1"),
        ]
        router = Router(run_dir, prefill=prefill, decode=decode, name="router-all")
        return cls(pool, prefill, decode, pairs, router)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def flush(self) -> None:
        """Empty every worker's own caches."""
        for worker in self.workers:
            worker.flush()


@dataclass
class Direct:
    """Two workers that hand over directly, and a decode worker that computes prompts, behind one router."""

    sender: Worker
    receiver: Worker
    other: Worker
    router: Router

    @classmethod
    def of(cls, run_dir: Path, servers: Servers) -> Direct:
        sender, receiver, other = (servers.workers[name] for name in NEEDS["direct"])
        extra = {"handoff": "direct"}
        return cls(
            sender,
            receiver,
            other,
            Router(run_dir, [sender], [receiver, other], name="router-direct", extra=extra),
        )

    def flush(self) -> None:
        """Empty every worker's own caches."""
        for worker in (self.sender, self.receiver, self.other):
            worker.flush()


@dataclass
class Site:
    """Pool nodes, etcd, and the servers on them."""

    pools: dict[str, PoolNode]
    etcd: EtcdServer
    servers: Servers
    lengths: Sequence[int]
    """Of the reference's prompts, in tokens."""
    routers: dict[str, list[Router]] = field(default_factory=dict)
    """By the fixture that started them."""
    reference: Reference | None = None

    def use(self, fixtures: Collection[str], later: Sequence[Collection[str]]) -> None:
        """Before a test that asks for these fixtures: what it needs is ready, the reference computed.
        `later`: the fixtures of following tests.
        """
        following = [self._needed(one) for one in later]
        if "reference" in fixtures and self.reference is None:
            self.servers.use(["plain"], [self._needed(fixtures), *following])
            self.reference = Reference.of(self.servers.workers["plain"], self.lengths)
            following = [self._needed(one) for one in later]
        self.servers.use(self._needed(fixtures), following)
        for router in [router for one in fixtures for router in self.routers.get(one, ())]:
            # it may not have heard yet that a server is back
            eventually(lambda router=router: not router.lacks, f"{router.name} has its workers", 60.0)  # type: ignore[misc]

    def _needed(self, fixtures: Collection[str]) -> list[str]:
        plain = ["plain"] if "reference" in fixtures and self.reference is None else []
        return [*plain, *(name for one, names in NEEDS.items() if one in fixtures for name in names)]

    @classmethod
    def of(cls, run_dir: Path, model: Path, lengths: Sequence[int], fixtures: Collection[str]) -> Site:
        """`fixtures`: those of all tests of the run. What none of them needs is not started."""
        pools = _pools(run_dir, fixtures)
        etcd = EtcdServer(run_dir)
        workers = _workers(run_dir, model, pools, etcd)
        servers = Servers({worker.name: worker for worker in workers}, warm.is_up)
        return cls(pools, etcd, servers, lengths)

    def start(self) -> None:
        """Start the pool nodes. Servers start as tests need them."""
        for pool in self.pools.values():
            pool.begin()
        for pool in self.pools.values():
            pool.wait_ready()

    def stop(self) -> None:
        self.servers.stop()
        for pool in self.pools.values():
            pool.stop()
        self.etcd.kill()


def _pools(run_dir: Path, fixtures: Collection[str]) -> dict[str, PoolNode]:
    ssd = {"kind": "ssd", "path": run_dir / "ssd", "capacity_bytes": "512MiB", "write": "all"}
    events = {"address": f"ipc://{run_dir}/{POOL_EVENTS}"}
    pools = [PoolNode(run_dir), PoolNode(run_dir, "aggpool", extra={"tiers": [ssd], "events": events})]
    if "hybrid" in fixtures:
        pools.append(PoolNode(run_dir, "hybridpool"))
    if "ucx_worker" in fixtures:
        peers = [f"unix:{run_dir}/ucxpool{i}.sock" for i in range(2)]
        extra = {"cluster": {"peers": peers}}
        pools += [PoolNode(run_dir, f"ucxpool{i}", "128MiB", extra=extra) for i in range(2)]
    return {pool.name: pool for pool in pools}


def _workers(run_dir: Path, model: Path, pools: dict[str, PoolNode], etcd: EtcdServer) -> list[Worker]:
    latent_model = make_latent_model(model, run_dir / "demo-latent")
    exact = engine_settings(model)
    direct = {
        "handoff": "direct",
        "direct": {"bootstrap_port": free_port(), "trusted_network": True},
    }
    events = {"publisher": "zmq", "endpoint": f"ipc://{run_dir}/{WORKER_EVENTS}"}
    observed = engine_settings(model, extra_args=["--kv-events-config", json.dumps(events)])
    chunked = engine_settings(model, extra_args=["--chunked-prefill-size", str(CHUNK_TOKENS)])
    few = engine_settings(model, extra_args=["--max-running-requests", "8"])
    staged = engine_settings(model, **STAGED)
    bytes_of_two = engine_settings(model, dtype="bfloat16", layout="layer_first")
    registered = {"etcd": {"endpoints": [etcd.url]}}
    two_ranks = engine_settings(model, page_pieces=2, extra_args=["--tp-size", "2"])
    latent = engine_settings(latent_model, extra_args=["--tp-size", "2"])
    embedding = engine_settings(model, extra_args=["--is-embedding"])
    drafted = engine_settings(model, extra_args=_drafting("STANDALONE", model))
    mtp = make_mtp_model(model, run_dir / "demo-mtp")
    predicting = engine_settings(mtp, extra_args=_drafting("EAGLE", mtp))
    in_chunks = engine_settings(
        mtp, extra_args=[*_drafting("EAGLE", mtp), "--chunked-prefill-size", str(CHUNK_TOKENS)]
    )
    patient = {"commit_timeout_s": 30.0}
    plain = {"storage": "none", "exact_turns": {"enabled": False}}
    lasting = {"stop_grace_s": 600.0}
    unhurried = {"exact_turns": {"lookup_s": 2.0}}  # on a busy machine
    stepwise = {"pull_step_tokens": CHUNK_TOKENS, **unhurried}
    shm = {"nodes": [pools["aggpool"].ref], "checksum": False}
    ucx_nodes = [pool.ref for name, pool in pools.items() if name.startswith("ucxpool")]
    ucx = {"nodes": ucx_nodes, "data_path": "ucx", "checksum": False}
    disaggregated = {"nodes": [pools["pool0"].ref], "retry_after_s": 0.2, "page_key": PAGE_KEY}
    of_ranks = {"nodes": [pools["pool0"].ref], "put_timeout_s": 30.0, "restart_wait_s": 0.0}
    plainly = {"nodes": [pools["pool0"].ref]}
    as_remote = {**of_ranks, "data_path": "tcp"}
    return [
        Worker("agg", "plain", run_dir, exact, settings=plain),
        Worker("agg", "agg", run_dir, observed, shm, registered),
        Worker("agg", "ucx", run_dir, bytes_of_two, ucx),
        Worker("prefill", "ranks-prefill", run_dir, two_ranks, of_ranks, patient),
        Worker("decode", "ranks-decode", run_dir, two_ranks, of_ranks),
        Worker("prefill", "ranks-one", run_dir, engine_settings(model, page_pieces=2), of_ranks, patient),
        Worker("agg", "latent", run_dir, latent, as_remote),
        Worker("agg", "embedder", run_dir, embedding, plainly),
        Worker("agg", "replicas", run_dir, engine_settings(model, extra_args=["--dp-size", "2"]), plainly),
        Worker("agg", "drafted", run_dir, drafted, plainly),
        Worker("prefill", "mtp-prefill", run_dir, in_chunks, plainly),
        Worker("decode", "mtp-decode", run_dir, predicting, plainly, stepwise),
        Worker("prefill", "prefill0", run_dir, chunked, disaggregated, unhurried),
        Worker("prefill", "prefill1", run_dir, staged, disaggregated, unhurried),
        Worker("decode", "decode0", run_dir, exact, disaggregated, stepwise),
        Worker("decode", "decode1", run_dir, staged, disaggregated, stepwise),
        *(Worker("elastic", f"elastic{i}", run_dir, few, disaggregated, lasting) for i in range(2)),
        *_hybrid(run_dir, make_hybrid_model(model, run_dir / "hybrid"), pools),
        Worker("prefill", "sender", run_dir, chunked, disaggregated, direct),
        Worker("decode", "receiver", run_dir, exact, disaggregated, direct),
    ]


def _hybrid(run_dir: Path, model: Path, pools: dict[str, PoolNode]) -> list[Worker]:
    whole = engine_settings(model, max_total_tokens=12_000)
    chunked = {**whole, "extra_args": [*whole["extra_args"], "--chunked-prefill-size", str(CHUNK_TOKENS)]}
    pages = {
        "nodes": [pool.ref for pool in pools.values() if pool.name == "hybridpool"],
        "page_key": PAGE_KEY,
    }
    return [
        Worker("prefill", "hybrid-prefill", run_dir, chunked, pages),
        Worker("decode", "hybrid-decode", run_dir, whole, pages, {"pull_step_tokens": CHUNK_TOKENS}),
    ]


def _drafting(algorithm: str, draft: Path) -> list[str]:
    """Three tokens are drafted, one after the other."""
    return [
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    ]
