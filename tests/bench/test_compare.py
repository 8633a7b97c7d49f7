"""`pdserve bench compare`: the clusters it starts, the order of its rounds, what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.serving.cluster import launched, workplace
from pdserve.bench.serving.compare import Measured, compare, summaries, total_tokens
from pdserve.bench.serving.contenders import NAMES, Setting, contender, device_tokens
from pdserve.bench.serving.load import Shape, make_load
from pdserve.bench.stores import BenchError
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import read_cluster_file
from pdserve.up.plan import make_plan
from pdserve.up.toml import to_toml
from tests import readme
from tests.bench.scripted import ScriptedServer
from tests.bench.test_multiturn import serving

SETTING = Setting(
    model_path="/m", directory="/run/b", device_tokens=640, extra_args=("--schedule-policy", "lpm")
)
PROCESSES = {
    "plain": ["agg0", "router"],
    "file": ["agg0", "router"],
    "agg": ["pool0", "agg0", "router"],
    "disagg": ["pool0", "prefill0", "decode0", "router"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_contenders_cluster_is_valid_for_every_process(name: str, tmp_path: Path) -> None:
    chosen = contender(name, SETTING, 9000, 9001)
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(chosen.tables))
    plan = make_plan(
        read_cluster_file(file, {}, {}),
        program=("pdserve",),
        run_dir=Path("/run/b"),
        ports=iter(range(20_000, 20_010)),
        cluster_token="secret",
    )
    check_tables(plan, str(file), SCHEMAS)
    assert [spec.name for spec in plan.processes] == PROCESSES[name]
    workers = [spec.config for spec in plan.processes if spec.role in ("agg", "prefill", "decode")]
    assert {worker["engine"]["max_total_tokens"] for worker in workers} == {640}
    assert all(worker["engine"]["extra_args"] == ["--schedule-policy", "lpm"] for worker in workers)
    assert {worker["cluster_token"] for worker in workers} == {""}  # the worker itself can be asked
    asked = chosen.port
    listening = {place.port: spec.role for spec in plan.processes for place in spec.listening}
    assert listening[asked] == ("agg" if name in ("plain", "file") else "router")
    assert listening[chosen.router_port] == "router"


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

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.prompts: dict[tuple[str, str], list[list[int]]] = {}

    @contextmanager
    def __call__(self, name: str, size: str) -> Iterator[str]:
        self.started.append((name, size))
        with serving(ScriptedServer(pause_s=0.02 if name == "plain" else 0.0)) as server:
            yield server.url
        asked = [body["prompt"] for body in server.bodies() if body["max_tokens"] == 3]
        self.prompts.setdefault((name, size), []).extend(asked)


SHAPE = Shape(users=2, rounds=2, turn_tokens=10, output_tokens=3)


@pytest.fixture(scope="module")
def compared() -> tuple[Launcher, list[Measured]]:
    launcher = Launcher()
    found = compare(
        ("plain", "agg"),
        ("small", "large"),
        2,
        SHAPE,
        7,
        launcher,
        lambda line: None,
        concurrency=1,
        silence_s=60.0,
    )
    return launcher, list(found)


def test_rounds_are_interleaved_and_begin_with_another_contender_each(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    launcher, measured = compared
    order = [("plain", "small"), ("agg", "small"), ("plain", "large"), ("agg", "large")]
    again = [("agg", "small"), ("plain", "small"), ("agg", "large"), ("plain", "large")]
    assert launcher.started == order + again
    assert [(one.contender, one.size) for one in measured] == order + again
    assert [one.round for one in measured] == [0] * 4 + [1] * 4


def test_all_contenders_get_the_same_load_and_each_round_another(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    launcher, _ = compared
    plain, *others = (sorted(prompts) for prompts in launcher.prompts.values())
    assert len(plain) == 8
    assert len({tuple(prompt) for prompt in plain}) == 8
    assert all(other == plain for other in others)


def test_medians_are_over_rounds_and_ratios_over_the_first_contender(
    compared: tuple[Launcher, list[Measured]],
) -> None:
    _, measured = compared
    found = summaries(measured)
    assert [(one.size, one.contender) for one in found] == [
        ("small", "plain"),
        ("small", "agg"),
        ("large", "plain"),
        ("large", "agg"),
    ]
    plain, agg = found[:2]
    later = [
        one.outcome.later.first_token_ms.p50
        for one in measured
        if one.outcome.later is not None and (one.size, one.contender) == ("small", "agg")
    ]
    assert len(later) == 2
    assert agg.later_turns_ms == pytest.approx(sum(filter(None, later)) / 2, abs=0.01)
    assert (plain.later_turns_over, plain.prompt_tokens_s_over) == (1.0, 1.0)
    assert plain.later_turns_ms is not None
    assert agg.later_turns_ms is not None
    assert agg.later_turns_over == pytest.approx(agg.later_turns_ms / plain.later_turns_ms, abs=0.01)
    assert (agg.rounds, agg.failed, agg.cached_share) == (2, 0, pytest.approx(0.5, abs=0.05))


def test_what_a_cache_must_hold_is_every_session_at_its_end() -> None:
    assert total_tokens(make_load(SHAPE, 1)) == 2 * (10 + 3 + 10 + 3)


def test_the_readme_shows_what_was_kept(
    compared: tuple[Launcher, list[Measured]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, measured = compared
    origin = {"command": "pdserve bench compare", "date": "2026-01-02", "machine": "two cores", "load": "eic"}
    lines = [json.dumps(origin).encode(), *map(msgspec.json.encode, [*measured, *summaries(measured)])]
    (tmp_path / "compare-turns-2026-01-02.jsonl").write_bytes(b"\n".join(lines))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    rows = [line for line in readme.serving().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 4
    assert rows[1].startswith("| small | plain |")
    assert "| 1.00 × |" in rows[1]
    assert "two cores; eic; medians of\n2 rounds" in readme.serving()
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "nothing")
    assert "no run is kept" in readme.serving()


def test_no_round_begins_that_would_not_end_in_time() -> None:
    def rounds(limit_s: float) -> int:
        said: list[str] = []
        search = {"concurrency": 0, "silence_s": 60.0, "limit_s": limit_s}
        found = compare(("agg",), ("small",), 3, SHAPE, 7, Launcher(), said.append, **search)  # type: ignore[arg-type]
        return len(list(found))

    assert rounds(1e-9) == 1
    assert rounds(0.0) == 3


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
