"""`python -m benchmarks compare`: the clusters it starts, the order of its rounds, what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.commands.load_options import loads_of
from benchmarks.serving.cluster import launched, workplace
from benchmarks.serving.compare import compare
from benchmarks.serving.contenders import (
    NAMES,
    OURS,
    Setting,
    cache_tokens,
    contender,
    device_tokens,
)
from benchmarks.serving.figures import Outcome
from benchmarks.serving.load.plan import Shape, first_turn_tokens, make_load, total_tokens
from benchmarks.serving.report.tables import summaries_table
from benchmarks.serving.summary import Measured, of, ratio, summaries
from benchmarks.stores import BenchError
from docs.generate.benchmarks import serving as pages
from docs.generate.benchmarks.results import NO_RUN
from pdserve.errors import ConfigError
from tests.support.bench.scripted import ScriptedServer
from tests.support.bench.serving import checked_plan, serving
from tests.support.router.mock_worker import Received, Wire

SETTING = Setting(
    model_path="/m", directory="/run/b", device_tokens=640, extra_args=("--schedule-policy", "lpm")
)
PROCESSES = {
    "plain": ["agg0", "router"],
    "file": ["agg0", "router"],
    "mooncake": ["agg0", "router"],
    "agg": ["pool0", "agg0", "router"],
    "agg-once": ["pool0", "agg0", "router"],
    "disagg": ["pool0", "prefill0", "decode0", "router"],
    "disagg-direct": ["pool0", "prefill0", "decode0", "router"],
    "agg-two": ["pool0", "agg0", "agg1", "router"],
    "elastic": ["pool0", "elastic0", "elastic1", "router"],
    "dead": ["pool0", "agg0", "router"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_contenders_cluster_is_valid_for_every_process(name: str, tmp_path: Path) -> None:
    chosen = contender(name, SETTING, 9000, 9001)
    plan = checked_plan(chosen, tmp_path)
    assert [spec.name for spec in plan.processes] == PROCESSES[name]
    # a cluster without one of its processes is not the one to measure, but where that is what is measured
    assert plan.settings.stop_on_loss == (name != "dead")
    workers = [spec.config for spec in plan.processes if spec.role in ("agg", "prefill", "decode", "elastic")]
    assert {worker["engine"]["max_total_tokens"] for worker in workers} == {640}
    # less than it would be, so that a prompt that fits is taken
    reserved = ["--num-reserved-decode-tokens", "64"] if name == "disagg-direct" else []
    flags = ["--schedule-policy", "lpm", *reserved]
    assert all(worker["engine"]["extra_args"] == flags for worker in workers)
    assert {worker["cluster_token"] for worker in workers} == {""}  # the worker itself can be asked
    asked = chosen.port
    listening = {place.port: spec.role for spec in plan.processes for place in spec.listening}
    assert listening[asked] == ("router" if name in OURS else "agg")
    assert listening[chosen.router_port] == "router"


def test_what_host_memory_does_not_take_is_given_to_the_pool() -> None:
    setting = replace(SETTING, kv_token_bytes=1000, pool_capacity="1MiB")
    [pool] = contender("agg-once", setting, 9000, 9001).tables["pool"]
    assert pool["capacity_bytes"] == 2**20 + (2.0 - 1.2) * 640 * 1000
    [pool] = contender("agg", setting, 9000, 9001).tables["pool"]
    assert pool["capacity_bytes"] == "1MiB"


@given(
    st.integers(1, 10**6), st.integers(1, 10**5), st.sampled_from([0.3, 1.1]), st.sampled_from([1, 16, 64])
)
def test_the_device_cache_holds_whole_pages_and_the_longest_session(
    total: int, longest: int, share: float, page: int
) -> None:
    tokens = device_tokens(total, longest, share, page)
    assert tokens % page == 0
    assert tokens >= longest
    assert tokens >= share * total
    assert tokens <= max(share * total, 1.1 * longest) + 2 * page + 1


class Launcher:
    """Scripted servers in the place of clusters."""

    def __init__(self, broken: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> None:
        self.broken, self.silent = broken, silent
        self.started: list[tuple[str, str]] = []
        self.running: list[str] = []
        self.order: list[tuple[str, str]] = []
        self.prompts: dict[tuple[str, str], list[list[int]]] = {}

    @contextmanager
    def __call__(self, name: str, size: str) -> Iterator[str]:
        if name in self.broken:
            raise BenchError(f"{name} did not start")
        self.started.append((name, size))
        with serving(ScriptedServer(pause_s=0.02 if name == "plain" else 0.0)) as server:
            if name in self.silent:
                server.script("/v1/completions", *[refuse] * 100)
            self.running.append(name)
            yield server.url
            self.running.remove(name)
        asked = [body["prompt"] for body in server.bodies() if body["max_tokens"] == 3]
        warm_up = 2
        self.prompts.setdefault((name, size), []).extend(asked[warm_up:])


async def refuse(wire: Wire, request: Received) -> None:
    await wire.json(503, {"error": {"message": "not now"}})


SHAPE = Shape(users=2, rounds=2, turn_tokens=10, output_tokens=3)
OTHER = Shape(users=1, rounds=2, turn_tokens=10, output_tokens=3, keeps_history=False)
LOADS = {"turns": SHAPE, "other": OTHER}


def compared_by(
    launcher: Launcher, contenders: tuple[str, ...] = ("plain", "agg"), rounds: int = 2, limit_s: float = 0.0
) -> tuple[list[Measured], list[str]]:
    measured: list[Measured] = []
    problems = compare(
        *(contenders, ("small", "large"), rounds, LOADS, 7, launcher, measured.append, lambda line: None),
        concurrency=1,
        silence_s=60.0,
        limit_s=limit_s,
    )
    return measured, problems


@pytest.fixture(scope="module")
def compared() -> tuple[Launcher, list[Measured]]:
    launcher = Launcher()
    measured, problems = compared_by(launcher)
    assert problems == []
    return launcher, measured


def test_all_are_started_once_and_take_turns_and_each_round_begins_with_another(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    launcher, measured = compared
    assert launcher.started == [("plain", "small"), ("agg", "small"), ("plain", "large"), ("agg", "large")]
    assert launcher.running == []
    of_a_size = [
        *(("turns", "plain", 0), ("turns", "agg", 0), ("other", "plain", 0), ("other", "agg", 0)),
        *(("turns", "agg", 1), ("turns", "plain", 1), ("other", "agg", 1), ("other", "plain", 1)),
    ]
    assert [(one.load, one.contender, one.round) for one in measured] == 2 * of_a_size
    assert [one.size for one in measured] == 8 * ["small"] + 8 * ["large"]


def test_at_a_rate_asks_do_not_wait_for_the_answers_before_them() -> None:
    measured: list[Measured] = []
    problems = compare(
        *(("plain",), ("small",), 1, {"turns": SHAPE}, 7, Launcher(), measured.append, lambda line: None),
        concurrency=0,
        silence_s=60.0,
        rate_s=1000.0,
    )
    assert problems == []
    [one] = measured
    assert one.outcome.late_asks == 2  # the second turns: a turn needs the answer before it, and only that
    assert one.outcome.all.first_token_mean_ms is not None


def test_all_contenders_get_the_same_loads_and_each_round_texts_of_its_own(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    launcher, _ = compared
    plain, *others = (sorted(prompts) for prompts in launcher.prompts.values())
    assert len(plain) == 2 * 4 + 2 * 2
    first_pages = [tuple(prompt[:10]) for prompt in plain]
    assert len(set(first_pages)) == 2 * 2 + 2 * 2  # a session's second prompt repeats its first
    assert all(other == plain for other in others)


def test_medians_are_over_rounds_and_ratios_over_the_base(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    _, measured = compared
    found = summaries(measured, "plain")
    assert [(one.load, one.size, one.contender) for one in found][:3] == [
        ("turns", "small", "plain"),
        ("turns", "small", "agg"),
        ("other", "small", "plain"),
    ]
    plain, agg = found[:2]
    later = [
        one.outcome.later.first_token_ms.p50
        for one in measured
        if one.outcome.later is not None and (one.load, one.size, one.contender) == ("turns", "small", "agg")
    ]
    assert len(later) == 2
    assert agg.later_turns_ms == pytest.approx(sum(filter(None, later)) / 2, abs=0.01)
    assert (plain.later_turns_over, plain.prompt_tokens_s_over) == (1.0, 1.0)
    assert agg.later_turns_over == ratio(agg, plain, "later_turns_ms")
    assert (agg.rounds, agg.failed, agg.cached_share) == (2, 0, pytest.approx(0.5, abs=0.05))
    assert agg.storage_share == pytest.approx(0.25, abs=0.05)


def test_a_ratio_is_the_median_of_the_rounds_own(compared: tuple[Launcher, list[Measured]]) -> None:
    """In hours that differ: 10 ms beside 100, 40 beside 200, 90 beside 300."""
    _, measured = compared
    template = next(one for one in measured if one.outcome.later is not None)
    firsts = {"plain": (100.0, 200.0, 300.0), "agg": (10.0, 40.0, 90.0)}
    rounds = [
        replace(template, contender=name, round=number, outcome=_with_later(template.outcome, first_ms))
        for name, found in firsts.items()
        for number, first_ms in enumerate(found)
    ]
    plain, agg = summaries(rounds, "plain")
    assert (agg.later_turns_ms, agg.later_turns_over) == (40.0, 0.2)
    assert ratio(agg, plain, "later_turns_ms", less=10.0) == 0.15
    first_is_missing = [one for one in rounds if (one.contender, one.round) != ("plain", 0)]
    assert summaries(first_is_missing, "plain")[1].later_turns_over == 0.25


def _with_later(outcome: Outcome, first_ms: float) -> Outcome:
    assert outcome.later is not None
    first_token = replace(outcome.later.first_token_ms, p50=first_ms)
    return replace(outcome, later=replace(outcome.later, first_token_ms=first_token))


def test_without_its_base_a_contender_has_no_ratio(compared: tuple[Launcher, list[Measured]]) -> None:
    _, measured = compared
    found = summaries([one for one in measured if one.contender != "plain"], "plain")
    assert {one.contender for one in found} == {"agg"}
    assert all(one.later_turns_over is None and one.first_turn_over is None for one in found)


def test_one_that_does_not_start_is_left_out_and_told() -> None:
    measured, problems = compared_by(Launcher(broken=("plain",)), rounds=1)
    assert {one.contender for one in measured} == {"agg"}
    assert problems == ["plain, small: plain did not start", "plain, large: plain did not start"]


def test_one_that_answers_nothing_is_told_and_does_not_spoil_the_others() -> None:
    measured, problems = compared_by(Launcher(silent=("plain",)), rounds=2)
    assert [one.round for one in measured if one.contender == "agg"] == 2 * [0, 0, 1, 1]
    bad = [one for one in measured if one.contender == "plain"]
    assert [one.outcome.all.failed for one in bad] == [4, 4]  # a round of each size, then no more
    assert any("4 of 4 asks failed" in problem for problem in problems)
    failed = of(summaries(measured, "plain"), "turns", "small", "plain")
    assert failed is not None
    assert (failed.failed, failed.later_turns_ms, failed.prompt_tokens_s) == (4, None, None)
    assert (failed.cached_share, failed.storage_share, failed.reusable_share) == (None, None, None)


def test_rounds_in_which_nothing_was_answered_do_not_count_in_the_shares(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    _, measured = compared
    found = [one for one in measured if (one.load, one.size, one.contender) == ("turns", "small", "agg")]
    refused, _ = compared_by(Launcher(silent=("agg",)), ("agg",), rounds=1)
    mixed = [found[0], *(replace(one, round=number) for number, one in enumerate([refused[0]] * 2, 2))]
    (alone,), (all_,) = summaries(found[:1], "agg"), summaries(mixed, "agg")
    assert (all_.rounds, all_.failed) == (3, 8)
    assert (all_.cached_share, all_.reusable_share) == (alone.cached_share, alone.reusable_share)
    summaries_table(summaries([*mixed, *refused], "agg"), "shown")


def test_no_round_begins_that_would_not_end_in_time() -> None:
    measured, problems = compared_by(Launcher(), ("agg",), rounds=3, limit_s=1e-9)
    assert [(one.size, one.load, one.round) for one in measured] == [
        *(("small", "turns", 0), ("small", "other", 0), ("large", "turns", 0), ("large", "other", 0))
    ]
    assert problems == []


def test_what_a_cache_must_hold_is_every_session_at_its_end() -> None:
    load = make_load(SHAPE, 1)
    assert total_tokens(load) == 2 * (10 + 3 + 10 + 3)
    assert first_turn_tokens(load) == 2 * (10 + 3)


def test_a_small_cache_is_small_for_every_load_and_a_large_one_large() -> None:
    few = Shape(users=4, rounds=2, turn_tokens=1000, output_tokens=10)
    many = msgspec.structs.replace(few, users=40)
    small, large = (cache_tokens([few, many], share, 1, 64) for share in (0.3, 1.1))
    assert small == device_tokens(4 * 2020, 2020, 0.3, 64)
    assert large == device_tokens(40 * 2020, 2020, 1.1, 64)
    assert cache_tokens([few], 0.3, 2, 64) >= 2 * 2020  # both that run have room
    assert cache_tokens([few], 0.3, 0, 64) >= 4 * 2020


def test_loads_are_read_from_words() -> None:
    loads = loads_of(["eic,scale=0.1,users=3", "no-reuse,rounds=2"], "eic", 1.0, {"rounds": 7})
    assert list(loads) == ["eic, scale 0.1, 3 users, 7 rounds", "no-reuse, scale 1, 8 users, 2 rounds"]
    assert next(iter(loads.values())).turn_tokens == 819
    assert list(loads_of([], "eic", 0.1, {})) == ["eic, scale 0.1, 8 users, 5 rounds"]


@pytest.mark.parametrize("text", ["eic,scale=0", "eic,users=x", "eic,spread=0.1", "eic,", "other"])
def test_a_load_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split(",")[0]):
        loads_of([text], "eic", 1.0, {})


def test_the_documents_show_what_was_kept(compared: tuple[Launcher, list[Measured]], tmp_path: Path) -> None:
    _, measured = compared
    origin = {
        "command": "python -m benchmarks compare",
        "date": "2026-01-02",
        "commit": "abc",
        "machine": "two cores",
    }
    lines = [
        json.dumps({**origin, "against": ["plain", "agg"]}).encode(),
        *map(msgspec.json.encode, [*measured, *summaries(measured, "plain")]),
    ]
    (tmp_path / "compare-small-2026-01-02.jsonl").write_bytes(b"\n".join(lines))
    shown = pages.compared(tmp_path)
    rows = [line for line in shown.splitlines() if line.startswith(("| small", "| large"))]
    assert len(rows) == 8
    assert rows[0].startswith("| small | plain | 2 |")
    assert "| 1.00 × |" in rows[0]
    assert "2026-01-02, abc\n- Machine: two cores" in shown
    assert "| from turn 2, over plain: tokens/s ≥ 3.7 × | turns | agg |" in pages.goals(tmp_path)
    # what a run that broke off has kept is shown as far as it goes
    (tmp_path / "compare-small-2026-01-02.jsonl").write_bytes(b"\n".join(lines[:3]))
    (tmp_path / "sweep-2026-01-02.jsonl").write_text(json.dumps({**origin, "load": "eic"}))
    (tmp_path / "weights-2026-01-02.jsonl").write_text(json.dumps({**origin, "load": "eic"}))
    assert "| small | agg | 1 |" in pages.compared(tmp_path)
    assert "Highest rate that holds: none" in pages.swept(tmp_path)
    assert "Load: eic." in pages.parts("weights", tmp_path)
    for block in (pages.compared, pages.goals, pages.swept):
        assert block(tmp_path / "nothing") == NO_RUN


def test_a_cluster_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with workplace(tmp_path) as (directory, memory):
        setting = Setting(
            model_path="/nowhere", directory=directory, device_tokens=640, arena_directory=memory
        )
        with pytest.raises(BenchError, match=r"agg did not start(.|\n)*/nowhere"), launched("agg", setting):
            pass
        assert list(Path(memory).iterdir()) == []
    assert not Path(memory).exists()
    assert (tmp_path / "agg" / "up.log").exists()
    assert "pool0 has stopped" in (tmp_path / "agg" / "up.log").read_text()
