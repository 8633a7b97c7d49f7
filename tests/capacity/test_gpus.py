"""Which GPUs workers get."""

from __future__ import annotations

import pytest

from pdserve.capacity.facts import Gpu, Machine, WorkerNeed
from pdserve.capacity.gpus import assign
from pdserve.errors import ConfigError


def machine(*nodes: int | None) -> Machine:
    gpus = tuple(Gpu(index=i, memory_bytes=1, numa_node=node) for i, node in enumerate(nodes))
    return Machine(memory_bytes=1, shm_bytes=1, gpus=gpus)


def worker(name: str, tp: int, gpus: tuple[int, ...] | None = None, **more: int) -> WorkerNeed:
    return WorkerNeed(name=name, role="agg", tp=tp, gpus=gpus, **more)  # type: ignore[arg-type]


def test_a_worker_stays_within_a_numa_node_where_one_has_room() -> None:
    here = machine(0, 0, 0, 0, 1, 1, 1, 1)
    found = assign(here, [worker("a", 1), worker("b", 4), worker("c", 2)])
    assert found == {"a": (6,), "b": (0, 1, 2, 3), "c": (4, 5)}


def test_a_worker_larger_than_a_numa_node_spans_them() -> None:
    assert assign(machine(0, 0, 1, 1), [worker("a", 2, pp=2)]) == {"a": (0, 1, 2, 3)}


def test_named_gpus_are_taken_first() -> None:
    found = assign(machine(None, None, None), [worker("a", 1), worker("b", 2, (0, 1))])
    assert found == {"a": (2,), "b": (0, 1)}


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (
            [worker("a", 4), worker("b", 2)],
            "a 4 + b 2 = 6 GPUs are needed (tp x pp of each worker), and 4 of 4 are free here: lower "
            "--tp-size, or start fewer workers",
        ),
        ([worker("a", 2, (0,))], "a: gpus = [0] must be 2 different GPUs (tp 2 x pp 1)"),
        ([worker("a", 2, (1, 1))], "a: gpus = [1, 1] must be 2 different GPUs (tp 2 x pp 1)"),
        (
            [worker("a", 1, (0,)), worker("b", 1, (0,))],
            "b: GPU 0 of its gpus is a's already: name another",
        ),
        (
            [worker("a", 1, (7,))],
            "a: GPU 7 of its gpus is not here (there are 0, 1, 2, 3): name another",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(workers: list[WorkerNeed], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        assign(machine(0, 0, 1, 1), workers)
    assert str(error.value) == said
