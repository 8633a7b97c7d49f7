"""Where the time to a stream's first token went, and its prompt's tokens came from."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.metrics.names import PARTS, TIERS, turn_label
from pdserve.router.metrics.stats import METRICS
from pdserve.router.request import reports
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import EVENTS, REPORT, answer
from tests.support.router.streams import TIMING, telling

CHAT = "/v1/chat/completions"


def value(text: str, name: str, **labels: str) -> float:
    """A sample's value; 0 where there is none."""
    wanted = ",".join(f'{key}="{word}"' for key, word in sorted(labels.items()))
    found = re.search(rf"^pdserve_router_{name}{{{re.escape(wanted)}}} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


async def streamed(harness: Harness, **more: object) -> dict[str, str]:
    """The headers of a stream read to its end."""
    response = await harness.chat(stream=True, **more)
    assert response.body == b"".join(EVENTS)
    return response.headers


@given(
    st.fixed_dictionaries(
        {}, optional={part: st.floats(0, 5) for part in ("queue", "settle", "prefill", "publish")}
    ),
    st.floats(0, 5),
    st.floats(0, 10),
)
def test_the_parts_are_in_sum_the_time_to_the_first_token(
    before: dict[str, float], pulled_s: float, waited_s: float
) -> None:
    started_s, asked_s = 100.0, 100.0 + sum(before.values()) + 0.5
    parts = {part: before[part] for part in PARTS if part in before}
    words = reports.finish_parts(parts, asked_s, pulled_s, started_s, asked_s + waited_s).decode()
    assert sum(parts.values()) == pytest.approx(asked_s + waited_s - started_s)
    assert min(parts.values()) >= 0
    assert parts["router"] == pytest.approx(0.5)
    assert words == ", ".join(f"{part};dur={1e3 * parts[part]:.1f}" for part in PARTS if part in parts)


@pytest.mark.parametrize(
    "said", [b"pull", b"pull;dur=x", b"pull;dur=-1", b"pull;dur=inf", b"pull;dur=nan", b""]
)
def test_nonsense_of_a_worker_counts_nothing(said: bytes) -> None:
    assert reports.pull_s(said) == 0.0
    assert sum(reports.parse_cached(f"{said.decode()}, device=-3, gpu=4").values()) == 0


def test_turns_have_few_labels() -> None:
    assert [turn_label(turn) for turn in (0, 1, 2, 3, 4, 7, 8, 15, 16, 9999)] == [
        *("none", "1", "2", "3", "4-7", "4-7", "8-15", "8-15", "16+", "16+")
    ]


async def test_a_stream_says_where_its_time_went_and_metrics_count_it() -> None:
    async with disagg() as (harness, _, [decode]):
        cached = "x-pdserve-cached: device=0, host=0, pool=32, computed=8\r\n"
        decode.script(CHAT, telling(TIMING + cached, computes_s=0.02))
        headers = await streamed(harness)
        said = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
        assert list(said) == ["prefill", "publish", "pull", "decode", "router"]
        assert headers["x-pdserve-cached"] == "device=0, host=0, pool=32, computed=8"
        await harness.chat()  # no stream: there is no first token to speak of
        text = (await harness.get("/metrics")).body.decode()
        for part in PARTS:
            expected = part in said
            assert value(text, "first_token_seconds_count", part=part) == expected, part
        whole = value(text, "time_to_first_byte_seconds_sum", route=CHAT)
        in_parts = sum(value(text, "first_token_seconds_sum", part=part) for part in PARTS)
        assert 0.01 < in_parts <= whole + 1e-6  # uvloop's clock counts milliseconds; sums are rounded


async def test_prompt_tokens_are_counted_once_by_the_worker_that_computed_them_and_by_turn() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        cached = "x-pdserve-cached: device=1, host=2, pool=3, computed=4\r\n"
        decode.script(CHAT, *(telling(cached) for _ in range(3)))
        await streamed(harness, user="u")  # the prefill worker says it
        prefill.script("/pd/prefill", answer(500, {}))
        await streamed(harness, user="u")  # that failed, so the decode worker does
        await streamed(harness)
        text = (await harness.get("/metrics")).body.decode()
        by_turn = {
            turn: [value(text, "turn_tokens_total", turn=turn, tier=tier) for tier in TIERS]
            for turn in ("1", "2", "3", "none")
        }
        assert sum(REPORT["cached"].values()) == 24
        assert by_turn == {
            "1": [8, 0, 16, 16],
            "2": [1, 2, 3, 4],
            "3": [0] * 4,
            "none": [8, 0, 16, 16],
        }


async def test_every_metric_of_the_list_is_on_a_live_router_and_no_other() -> None:
    async with disagg() as (harness, _, _):
        text = (await harness.get("/metrics")).body.decode()
        shown = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        assert shown == {one.full_name: one.kind for one in METRICS}


async def test_times_are_finer_than_a_millisecond() -> None:
    """uvloop's clock counts whole ones, and stands still while a callback runs."""
    async with disagg() as (harness, _, _):
        said = [(await streamed(harness))["server-timing"] for _ in range(10)]
        spent_ms = [float(number) for line in said for number in re.findall(r"dur=([\d.]+)", line)]
        assert any(number % 1.0 for number in spent_ms)
        assert all("decode;dur=0.0" not in line for line in said)
