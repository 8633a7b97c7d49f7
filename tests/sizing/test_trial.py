"""What a trial with real workers measures, from scripted records, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.serving.load.plan import Load
from benchmarks.serving.load.records import Record
from benchmarks.simulate.calibrate import measure_hop, measure_rates
from benchmarks.simulate.outcome import judge
from benchmarks.simulate.rates import Rates
from benchmarks.simulate.real import NEVER_MS, Compared, Trial, rows, served
from benchmarks.simulate.size import Size
from benchmarks.stores import BenchError
from pdserve.router.config.slo import ServiceLevel

RATES = Rates(prefill_ms_per_token=2.0, step_ms=60.0, step_ms_per_request=15.0)


def worker(
    rates: Rates, workers: int = 1, hop_ms: float = 0.0, pool_ms: float = 0.0, error: str = ""
) -> Callable[[Load, int], Sequence[Record]]:
    """Answers as workers of these rates would that have nothing else to do."""

    def send(load: Load, concurrency: int) -> list[Record]:
        each = rates.step_ms + rates.step_ms_per_request * -(-concurrency // workers)
        return [
            Record(
                session=ask.session,
                turn=1,
                planned_s=0.0,
                due_s=0.0,
                sent_s=0.0,
                first_s=(hop_ms + (rates.prefill_ms_per_token + pool_ms) * ask.prompt_tokens) / 1e3,
                done_s=100.0,
                prompt_tokens=ask.prompt_tokens,
                output_tokens=ask.output_tokens,
                gaps_s=[each / 1e3] * (ask.output_tokens - 1),
                error=error,
            )
            for ask in load.asks
        ]

    return send


def test_rates_come_back_that_workers_have() -> None:
    found = measure_rates(worker(RATES, workers=2), workers=2, prompt_tokens=512, together=3)
    assert found.prefill_ms_per_token == pytest.approx(RATES.prefill_ms_per_token)
    assert found.step_ms == pytest.approx(RATES.step_ms)
    assert found.step_ms_per_request == pytest.approx(RATES.step_ms_per_request)


def test_a_hand_over_is_told_apart_from_its_tokens() -> None:
    found = measure_hop(worker(RATES, hop_ms=40.0, pool_ms=0.25), RATES, (128, 512))
    assert found == pytest.approx((40.0, 0.25))


def test_rates_are_not_taken_from_requests_that_failed() -> None:
    with pytest.raises(BenchError, match="status-503"):
        measure_rates(worker(RATES, error="status-503"), workers=1, prompt_tokens=64, together=2)


def test_a_failed_request_is_late_for_any_level() -> None:
    (record,) = worker(RATES)(_one_ask(), 1)
    lost = served(Record(**{**_fields(record), "error": "status-502"}))
    assert lost.ttft_ms == NEVER_MS
    assert served(record).ttft_ms == pytest.approx(2.0 * 64)


def test_the_router_is_told_what_the_simulation_is_told() -> None:
    trial = Trial(lambda seed: [], 0.1, ServiceLevel(ttft_ms=900.0), 64, print, silence_s=1.0)
    told = trial.router(RATES)
    assert told["slo"] == {"ttft_ms": 900.0}
    assert told["placement"] == {"prefill_ms_per_token": 2.0}
    assert told["min_prefill_tokens"] == 64


def test_a_row_has_the_means_of_its_rounds() -> None:
    good, bad = _compared(0, [10.0, 10.0]), _compared(1, [10.0, 5000.0])
    (row,) = rows([good, bad])
    assert (row.kind, row.rounds, row.in_time, row.late) == ("elastic", 2, 0.75, 0.25)
    assert row.simulated == row.in_time


def _one_ask() -> Load:
    from benchmarks.simulate.calibrate import _asks

    return _asks(9, 64, 4, count=1)


def _fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in Record.__struct_fields__}


def _compared(number: int, ttft_ms: list[float]) -> Compared:
    records = [
        Record(
            session=place,
            turn=1,
            planned_s=0.0,
            due_s=0.0,
            sent_s=0.0,
            first_s=ms / 1e3,
            done_s=ms / 1e3,
            prompt_tokens=8,
            output_tokens=1,
        )
        for place, ms in enumerate(ttft_ms)
    ]
    outcome = judge(
        Size(elastic=2),
        [served(record) for record in records],
        ServiceLevel(ttft_ms=1000.0),
        arrivals_s=1.0,
        wall_s=2.0,
        duty_changes=0,
        busy={},
    )
    return Compared(kind="elastic", round=number, failed=0, measured=outcome, simulated=outcome)
