"""Secrets of a pool on several hosts stay the same from start to start: pages in its memory know them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.up.planner import TOKENS_FILE, pool_tokens


def test_tokens_outlive_a_start_and_are_taken_from_no_directory_that_others_can_write(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"  # not there yet
    first = pool_tokens(one)
    assert pool_tokens(one) == first
    assert len({first.node, first.page, pool_tokens(other).node, pool_tokens(other).page}) == 4
    assert stat.S_IMODE((one / TOKENS_FILE).stat().st_mode) == 0o600
    (other / TOKENS_FILE).write_text("{")
    assert pool_tokens(other) == pool_tokens(other), "made anew"
    one.chmod(0o777)
    with pytest.raises(StartupError, match="can be written by other users"):
        pool_tokens(one)
