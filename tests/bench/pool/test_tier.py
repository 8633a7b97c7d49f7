"""`python -m benchmarks tier` measures and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pool.tier import measure_tier
from pdserve.errors import PdserveError

MIB = 1 << 20


def test_the_tier_is_measured_beside_plain_io_and_nothing_stays(tmp_path: Path) -> None:
    figures = measure_tier(tmp_path, MIB, 32 * MIB, threads=2, rounds=1, fio=False)
    rates = (figures.put_gbps, figures.load_gbps, figures.plain_write_gbps, figures.plain_read_gbps)
    assert all(rate > 0 for rate in rates)
    assert figures.fio_read_gbps == 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_an_error_in_words(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PdserveError, match="file"):
        measure_tier(file, MIB, 32 * MIB, threads=2, rounds=1, fio=False)
