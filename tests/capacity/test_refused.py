"""Models that the pool cannot serve yet are refused before their weights are loaded, each with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.capacity.facts import WorkerNeed
from pdserve.capacity.gather import read_machine
from pdserve.capacity.model import model_facts
from pdserve.capacity.plan import make_fit

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "gpt-oss-120b",
            "layers with a window apart, which the pool cannot: add --disable-hybrid-swa-memory",
            marks=pytest.mark.model_support(
                "sliding windows",
                "pool",
                refused="layers with a window apart, which the pool cannot: add --disable-hybrid-swa-memory",
            ),
        ),
        pytest.param(
            "qwen3-next-80b-a3b",
            'layers with a state, which the pool cannot keep yet: set storage = "none"',
            marks=pytest.mark.model_support(
                "state layers",
                "pool",
                refused='layers with a state, which the pool cannot keep yet: set storage = "none"',
            ),
        ),
        pytest.param(
            "deepseek-v3.2",
            'an index for sparse attention, which the pool cannot keep yet: set storage = "none"',
            marks=pytest.mark.model_support(
                "sparse index",
                "pool",
                refused='an index for sparse attention, which the pool cannot keep yet: set storage = "none"',
            ),
        ),
    ],
)
def test_the_plan_names_what_the_pool_cannot_keep(name: str, said: str) -> None:
    facts = json.loads((HERE / "models" / f"{name}.json").read_text())
    worker = WorkerNeed(name="w", role="agg", tp=8)
    model = model_facts(name, facts["config"], facts["weight_bytes"])
    fit = make_fit(read_machine(HERE / "machines" / "h200x8.toml"), [worker], {"w": model}, [])
    assert [note.level for note in fit.notes if said in str(note)] == ["fail"]
