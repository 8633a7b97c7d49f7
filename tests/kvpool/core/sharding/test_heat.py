from __future__ import annotations

import pytest

from pdserve.kvpool.core.sharding.heat import Heat


def warm(heat: Heat, slot: int, reads_s: float, seconds: int, start_s: int = 0) -> None:
    """Read evenly, with `advance` once a second as the node does it."""
    for second in range(start_s, start_s + seconds):
        heat.advance(float(second))
        for _ in range(round(reads_s)):
            heat.read(slot)


@pytest.mark.parametrize("reads_s", [5, 40, 200])
def test_a_steady_rate_is_measured(reads_s: int) -> None:
    heat = Heat(4, half_life_s=10.0, hot_reads_s=30.0, now_s=0.0)
    warm(heat, 1, reads_s, 100)
    assert heat.reads_s(1) == pytest.approx(reads_s, rel=0.05)
    assert heat.reads_s(0) == 0.0
    assert (1 in heat.hot) == (reads_s > 30)


def test_it_halves_with_every_half_life() -> None:
    heat = Heat(1, 10.0, 30.0, 0.0)
    warm(heat, 0, 100, 60)
    before = heat.reads_s(0)
    heat.advance(59.0 + 20.0)
    assert heat.reads_s(0) == pytest.approx(before / 4)


def test_another_page_in_the_slot_starts_cold() -> None:
    heat = Heat(1, 10.0, 1.0, 0.0)
    warm(heat, 0, 100, 5)
    heat.filled(0)
    assert (heat.reads_s(0), heat.hot) == (0.0, set())


def test_rates_stay_right_over_hours_and_after_a_long_silence() -> None:
    heat = Heat(2, 1.0, 30.0, 0.0)
    warm(heat, 0, 50, 2000)  # the sums were divided three times
    assert heat.reads_s(0) == pytest.approx(50, rel=0.5)  # a second is a whole half-life here
    heat.advance(1e9)
    assert heat.reads_s(0) == pytest.approx(0.0, abs=1e-9)
    warm(heat, 1, 50, 20, start_s=10**9 + 1)
    assert heat.reads_s(1) > 30
