"""Secrets of a pool on several hosts stay the same from start to start: pages in its memory know them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.up.planner import TOKENS_FILE, pool_tokens


def test_a_cluster_that_is_started_again_has_the_tokens_of_its_last_start(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"  # not there yet
    first = pool_tokens(one)
    assert pool_tokens(one) == first
    assert len({first.node, first.page, pool_tokens(other).node, pool_tokens(other).page}) == 4
    assert stat.S_IMODE((one / TOKENS_FILE).stat().st_mode) == 0o600


def test_a_file_of_tokens_that_is_none_is_made_anew_and_one_that_cannot_be_read_is_said(
    tmp_path: Path,
) -> None:
    (tmp_path / TOKENS_FILE).write_text("{")
    assert pool_tokens(tmp_path) == pool_tokens(tmp_path)
    (tmp_path / TOKENS_FILE).unlink()
    (tmp_path / TOKENS_FILE).mkdir()
    with pytest.raises(StartupError, match=r"pool-tokens.json: cannot be read: Is a directory"):
        pool_tokens(tmp_path)


def test_tokens_are_taken_from_no_directory_that_others_can_write(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    (run_dir / TOKENS_FILE).write_text('{"node": "known", "page": "known"}')
    with pytest.raises(StartupError, match="can be written by other users"):
        pool_tokens(run_dir)
