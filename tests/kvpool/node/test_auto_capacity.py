"""`capacity_bytes = "auto"`: what a node takes of its own host, wherever it was started."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.kvpool.node.bootstrap import Host, auto_capacity, with_capacity
from tests.support.kvpool.nodes import small_config

MIB, GIB = 1 << 20, 1 << 30
LARGE = Host(memory_bytes=2048 * GIB, has_gpus=True)
SMALL = Host(memory_bytes=16 * GIB, has_gpus=False)


@pytest.mark.parametrize(
    ("host", "free", "taken", "why"),
    [
        (LARGE, 1024 * GIB, 512 * GIB, "a quarter of this host's memory"),
        (LARGE, 64 * GIB, 48 * GIB, "three quarters of what /x has free"),
        (SMALL, 8 * GIB, 2 * GIB, "no GPU is here"),
        (Host(memory_bytes=4 * GIB, has_gpus=False), 2 * GIB, 1 * GIB, "a quarter"),
        (SMALL, 64 * MIB, 48 * MIB, "three quarters"),
    ],
)
def test_a_new_arena_leaves_room_for_the_workers_beside_it(
    host: Host, free: int, taken: int, why: str
) -> None:
    found, reason = auto_capacity(host, "/x", free)
    assert found == taken
    assert why in reason


def test_a_node_says_what_it_takes_and_keeps_the_size_of_an_arena_that_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = small_config(capacity_bytes="auto")
    try:
        with caplog.at_level(logging.INFO):
            first = with_capacity(config, Host(memory_bytes=128 * MIB, has_gpus=True))
        assert first.capacity == 32 * MIB
        assert 'node node: capacity_bytes = "auto" is 32 MiB' in caplog.text
        arena = config.arena_dir / config.name / "arena"
        arena.parent.mkdir(parents=True)
        with arena.open("wb") as file:
            file.truncate(first.capacity)
        assert with_capacity(config, LARGE).capacity == 32 * MIB, "another size would lose its pages"
        assert with_capacity(small_config(arena_dir=config.arena_dir), LARGE).capacity == 16 * MIB, (
            "as it says"
        )
    finally:
        shutil.rmtree(config.arena_dir)


def test_slabs_of_large_pages_stay_the_same_when_the_node_starts_again() -> None:
    config = small_config(capacity_bytes="auto", page_bytes=13 << 20)
    first = with_capacity(config, Host(memory_bytes=401 * MIB, has_gpus=True))
    again = with_capacity(config, Host(memory_bytes=4 * first.capacity, has_gpus=True))
    assert (again.capacity, again.slab) == (first.capacity, first.slab)


def test_a_memory_file_system_that_is_too_small_is_named_in_one_line(tmp_path: Path) -> None:
    config = small_config(capacity_bytes="auto", arena_dir=tmp_path)
    with pytest.raises(StartupError) as refused:
        with_capacity(config, Host(memory_bytes=2 * MIB, has_gpus=True))
    assert "\n" not in str(refused.value)
    assert f"{tmp_path}" in str(refused.value)
    assert "capacity_bytes" in str(refused.value)
