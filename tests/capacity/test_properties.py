"""What holds for every plan: no GPU twice, and never more memory than the machine has."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from pdserve.capacity.facts import Fit, Gpu, Machine, Model, PoolNeed, WorkerNeed
from pdserve.capacity.memory import GB, GIB
from pdserve.capacity.plan import make_fit
from pdserve.errors import ConfigError

gpus = st.lists(st.sampled_from([None, 0, 1]), min_size=8, max_size=16).map(
    lambda nodes: tuple(
        Gpu(index=i, memory_bytes=80 * GIB, compute="9.0", numa_node=node) for i, node in enumerate(nodes)
    )
)
machines = st.builds(
    Machine,
    memory_bytes=st.integers(100, 3000).map(lambda gb: gb * GB),
    shm_bytes=st.sampled_from([64 << 20, 8 * GIB, 500 * GIB]),
    gpus=gpus,
)
models = st.builds(
    Model,
    name=st.just("m"),
    architecture=st.just("A"),
    weight_bytes=st.integers(1, 60).map(lambda gb: gb * GB),
    layers=st.integers(1, 90),
    kv_heads=st.sampled_from([0, 1, 4, 8]),
    token_values=st.sampled_from([128, 256, 576]),
    dtype_bytes=st.sampled_from([1, 2]),
    context_tokens=st.sampled_from([4096, 40960, 262144]),
)


@st.composite
def workers(draw: st.DrawFn) -> list[WorkerNeed]:
    found = []
    for i in range(draw(st.integers(1, 4))):
        tp = draw(st.sampled_from([1, 2, 2, 4]))
        named = tuple(range(draw(st.integers(0, 8)), 16))[:tp]  # at times another's, or not there
        need = WorkerNeed(
            name=f"w{i}",
            role=draw(st.sampled_from(["prefill", "decode", "agg"])),
            tp=tp,
            gpus=draw(st.sampled_from([None, None, None, named])),
            buffer_only=draw(st.booleans()),
            hicache_size_gb=draw(st.sampled_from([0, 0, 5, 50])),
            hicache_ratio=draw(st.sampled_from([None, None, 1.5])),
            has_storage=draw(st.sampled_from([True, True, False])),
        )
        found.append(need)
    return found


pools = st.lists(
    st.builds(
        PoolNeed,
        name=st.integers(0, 10**9).map(str),
        capacity_bytes=st.sampled_from([None, None, 4 * GIB]),
        in_shm=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda pool: pool.name,
)


def fit_of(machine: Machine, needs: list[WorkerNeed], model: Model, nodes: list[PoolNeed]) -> Fit:
    """Only plans that are not refused; Hypothesis fails where these become rare."""
    try:
        return make_fit(machine, needs, {need.name: model for need in needs}, nodes)
    except ConfigError:
        assume(False)
        raise


@given(machines, workers(), models, pools)
def test_no_gpu_is_given_twice_and_each_worker_has_its_number(
    machine: Machine, needs: list[WorkerNeed], model: Model, nodes: list[PoolNeed]
) -> None:
    fit = fit_of(machine, needs, model, nodes)
    given_out = [index for worker in fit.workers for index in worker.gpus]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= {gpu.index for gpu in machine.gpus}
    assert [len(worker.gpus) for worker in fit.workers] == [need.ranks for need in needs]


@given(machines, workers(), models, pools)
def test_host_memory_is_never_more_than_the_machine_has(
    machine: Machine, needs: list[WorkerNeed], model: Model, nodes: list[PoolNeed]
) -> None:
    fit = fit_of(machine, needs, model, nodes)
    hosts = sum(worker.host_bytes * worker.ranks for worker in fit.workers)
    arenas = sum(pool.capacity_bytes for pool in fit.pools)
    assert hosts + arenas + fit.reserve_bytes <= machine.memory_bytes
    chosen_in_shm = [
        pool.capacity_bytes
        for pool, need in zip(fit.pools, nodes, strict=True)
        if need.in_shm and need.capacity_bytes is None
    ]
    assert sum(chosen_in_shm) <= machine.shm_bytes


@given(machines, workers(), models, pools)
def test_what_a_table_says_is_kept(
    machine: Machine, needs: list[WorkerNeed], model: Model, nodes: list[PoolNeed]
) -> None:
    fit = fit_of(machine, needs, model, nodes)
    for need, worker in zip(needs, fit.workers, strict=True):
        if need.gpus is not None:
            assert worker.gpus == need.gpus
        if need.hicache_size_gb and need.has_storage:
            assert worker.host_bytes == need.hicache_size_gb * GB
    for node, pool in zip(nodes, fit.pools, strict=True):
        assert node.capacity_bytes in (None, pool.capacity_bytes)
