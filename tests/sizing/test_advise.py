"""The smallest fleet for a level, and what a load that turns makes of fixed and of elastic roles."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.serving.parts import Sample
from benchmarks.simulate.advise import KINDS, Adviser
from benchmarks.simulate.load import read_load, turning
from benchmarks.simulate.rates import Given, Rates, combine, read_samples
from benchmarks.simulate.size import Setting, Size
from pdserve.errors import ConfigError
from pdserve.router.config.slo import ServiceLevel

RATES = Rates(
    prefill_ms_per_token=0.1, step_ms=10.0, step_ms_per_request=0.5, pool_ms_per_token=0.005, hop_ms=10.0
)
SETTING = Setting(rates=RATES, level=ServiceLevel(ttft_ms=2000.0, itl_ms=30.0))


@pytest.fixture(scope="module")
def adviser() -> Adviser:
    return Adviser(turning(1, 800, 4.0), SETTING)


def test_the_advised_fleet_keeps_the_level_and_one_worker_less_does_not(adviser: Adviser) -> None:
    for kind in KINDS:
        advice = adviser.advise(kind, 0.9, 32)
        assert advice.reached
        assert advice.chosen.in_time >= 0.9
        less = advice.chosen.size.total - 1
        if less >= (2 if kind == "disagg" else 1):
            assert adviser.best(kind, less).in_time < 0.9
        assert advice.chosen in advice.steps
        assert [one.size.total for one in advice.steps] == sorted({one.size.total for one in advice.steps})


def test_where_no_number_of_workers_keeps_the_level_the_best_one_is_said() -> None:
    hopeless = msgspec.structs.replace(SETTING, level=ServiceLevel(ttft_ms=1.0))
    advice = Adviser(turning(1, 60, 4.0), hopeless).advise("elastic", 0.9, 4)
    assert not advice.reached
    assert advice.chosen.in_time < 0.9


def test_elastic_roles_keep_more_of_a_load_that_turns_than_fixed_ones(adviser: Adviser) -> None:
    fixed, elastic, aggregated = adviser.compared(4)
    assert elastic.in_time > max(fixed.in_time, aggregated.in_time)
    assert elastic.duty_changes <= 6


def test_more_pool_never_finds_less(adviser: Adviser) -> None:
    load = [
        msgspec.structs.replace(one, blocks=(number % 7, number % 7 + 100))
        for number, one in enumerate(adviser.load)
    ]
    setting = msgspec.structs.replace(SETTING, worker_blocks=0)
    found = [one.cached for _, one in Adviser(load[:200], setting).pools(Size(elastic=2))]
    assert found[0] == 0.0
    assert found[-1] == max(found) > 0


def test_rates_are_those_measured_unless_given(tmp_path: Path) -> None:
    raw = tmp_path / "weights.jsonl"
    sample = Sample(
        turn=1,
        prompt_tokens=1000,
        cached_tokens=200,
        first_token_ms=1000.0,
        router={"publish": 20.0},
        prefill={"compute": 880.0},
        decode={"queue": 1.0, "pull": 15.0, "compute": 29.0},
    )
    origin, medians = b'{"date": "x"}', b'{"turn": 1, "requests": 4}'
    raw.write_bytes(b"\n".join([origin, msgspec.json.encode(sample), msgspec.json.encode(sample), medians]))
    samples = read_samples(raw)
    measured = combine(Given(step_ms=50.0, step_ms_per_request=1.0), samples)
    assert measured.prefill_ms_per_token == pytest.approx(1.1)
    assert measured.pool_ms_per_token == pytest.approx(0.015)
    assert measured.hop_ms == pytest.approx(50)
    given = combine(Given(prefill_tokens_s=500, hop_ms=3, step_ms=50.0, step_ms_per_request=1.0), samples)
    assert (given.prefill_ms_per_token, given.hop_ms) == (2.0, 3)
    with pytest.raises(ConfigError, match="--step-ms"):
        combine(Given(prefill_tokens_s=1.0), [])
    with pytest.raises(ConfigError, match="--prefill-tokens-s"):
        combine(Given(step_ms=1.0, step_ms_per_request=0.0), [])
    (tmp_path / "none.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="no sample"):
        read_samples(tmp_path / "none.jsonl")


def test_a_trace_is_read_in_order_and_faster_if_asked(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [%d, %d]}\n'
    (tmp_path / "trace.jsonl").write_text(line % (3000, 1, 2) + line % (1000, 1, 3) + line % (9000, 1, 4))
    load = read_load(tmp_path / "trace.jsonl", 2, 2.0)
    assert [one.at_s for one in load] == [0.0, 1.0]
    assert [one.blocks for one in load] == [(1, 3), (1, 2)]
    assert load[0].prefix.digests[:2] == load[1].prefix.digests[:2]
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="input_length"):
        read_load(tmp_path / "bad.jsonl", 0, 1.0)
