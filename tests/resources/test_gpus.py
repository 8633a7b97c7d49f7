"""How many GPUs workers need, and which they get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.resources.gpus import GpuRequest, assign, described, gpu_count
from pdserve.resources.machine import Gpu, Machine


def machine(*nodes: int | None) -> Machine:
    gpus = tuple(Gpu(index=i, memory_bytes=1, name="H100", numa_node=node) for i, node in enumerate(nodes))
    return Machine(memory_bytes=1, shm_bytes=1, gpus=gpus)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 1),
        (["--tp-size", "4"], 4),
        (["--tp=2", "--tp-size", "4", "--pp-size=2"], 8),
        (["--tp-size", "2", "--dp-size", "3"], 6),
        (["--tp-size", "4", "--dp-size", "4", "--enable-dp-attention"], 4),
        (["--device", "cpu"], 0),
    ],
)
def test_flags_say_how_many_gpus_a_worker_needs(words: list[str], expected: int) -> None:
    assert gpu_count(words) == expected


def test_the_table_says_where_a_worker_runs_unless_a_flag_does() -> None:
    assert gpu_count([], "cpu") == 0
    assert gpu_count(["--device=cuda"], "cpu") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp-size", "many"], "--tensor-parallel-size must be a number, at least 1, found 'many'"),
        (["--pp=0"], "--pipeline-parallel-size must be a number"),
        (["--base-gpu-id", "4"], "--base-gpu-id: `pdserve up` gives GPUs to workers"),
    ],
)
def test_flags_that_give_no_number_of_gpus_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gpu_count(words)


def test_a_worker_stays_within_a_numa_node_where_one_has_room() -> None:
    here = machine(0, 0, 0, 0, 1, 1, 1, 1)
    found = assign(here, [GpuRequest("a", 1), GpuRequest("b", 4), GpuRequest("c", 2)])
    assert found == {"a": (6,), "b": (0, 1, 2, 3), "c": (4, 5)}


def test_a_worker_larger_than_a_numa_node_spans_them() -> None:
    assert assign(machine(0, 0, 1, 1), [GpuRequest("a", 4)]) == {"a": (0, 1, 2, 3)}


def test_named_gpus_are_taken_first() -> None:
    found = assign(machine(None, None, None), [GpuRequest("a", 1), GpuRequest("b", 2, (0, 1))])
    assert found == {"a": (2,), "b": (0, 1)}


def test_a_line_says_which_gpus_and_where() -> None:
    here = machine(0, 0, 1)
    assert described(here, "a", (0, 1)) == "a: GPUs 0, 1 (H100, NUMA node 0)"
    assert described(here, "b", (2,)) == "b: GPU 2 (H100, NUMA node 1)"


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (
            [GpuRequest("a", 4), GpuRequest("b", 2)],
            "b: 2 GPUs are needed (tp x pp), and 0 of 4 are free here: lower --tp-size, or start fewer "
            "workers",
        ),
        (
            [GpuRequest("a", 2, (1, 1))],
            "a: 2 GPUs are needed (tp x pp), and 1 of 4 are free here: lower --tp-size, or start fewer "
            "workers",
        ),
        (
            [GpuRequest("a", 1, (0,)), GpuRequest("b", 1, (0,))],
            "b: GPU 0 of its gpus is a's already: name another",
        ),
        ([GpuRequest("a", 1, (7,))], "a: GPU 7 of its gpus is not here: name another"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(requests: list[GpuRequest], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        assign(machine(0, 0, 1, 1), requests)
    assert str(error.value) == said


@given(
    st.lists(st.sampled_from([None, 0, 1]), max_size=16),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_no_gpu_is_given_twice_and_each_worker_has_its_number(
    nodes: list[int | None], counts: list[int]
) -> None:
    here, requests = machine(*nodes), [GpuRequest(f"w{i}", count) for i, count in enumerate(counts)]
    if sum(counts) > len(nodes):
        with pytest.raises(ConfigError, match="GPUs are needed"):
            assign(here, requests)
        return
    found = assign(here, requests)
    given_out = [index for numbers in found.values() for index in numbers]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= {gpu.index for gpu in here.gpus}
    assert [len(found[one.name]) for one in requests] == counts
