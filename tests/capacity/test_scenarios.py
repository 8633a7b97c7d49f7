"""Machines and models as files, and what their plans say, to be read by eye.

Each file of scenarios/ names a machine, a model, perhaps one that drafts, the workers and pool nodes; under
the line is what the plan says. `PDSERVE_WRITE_SCENARIOS=1` writes that anew: read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.capacity.drafts import with_draft
from pdserve.capacity.facts import Model, PoolNeed, WorkerNeed
from pdserve.capacity.gather import read_machine
from pdserve.capacity.model import model_facts
from pdserve.capacity.plan import make_fit
from pdserve.capacity.report import lines
from pdserve.errors import ConfigError
from pdserve.sizes import parse_bytes

HERE = Path(__file__).parent
SCENARIOS = sorted((HERE / "scenarios").glob("*.txt"))
RULE = "---\n"


def model(name: str) -> Model:
    facts = json.loads((HERE / "models" / f"{name}.json").read_text())
    return model_facts(name, facts["config"], facts["weight_bytes"])


def planned(script: str) -> str:
    workers: list[WorkerNeed] = []
    pools: list[PoolNeed] = []
    named: dict[str, str] = {}
    for line in script.splitlines():
        word, *options = line.split()
        if word in ("machine", "model", "draft"):
            named[word] = options[0]
        elif word == "pool":
            sizes = {key: parse_bytes(value) for key, value in (one.split("=") for one in options)}
            pools.append(PoolNeed(name=f"pool{len(pools)}", **sizes))
        else:
            count = sum(one.role == word for one in workers)
            given: dict[str, Any] = {"name": f"{word}{count}", "role": word}
            for key, value in (one.split("=") for one in options):
                given[key] = value.split(",") if key in ("gpus", "backends") else value
            workers.append(msgspec.convert(given, WorkerNeed, strict=False))
    machine = read_machine(HERE / "machines" / f"{named['machine']}.toml")
    if draft := named.get("draft"):
        workers = [replace(worker, draft_path=draft) for worker in workers]
    models = {worker.name: with_draft(named["model"], worker, model) for worker in workers}
    try:
        return "\n".join(lines(make_fit(machine, workers, models, pools))) + "\n"
    except ConfigError as error:
        return f"refused: {error}\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_plan_is_as_written(path: Path) -> None:
    script, _, expected = path.read_text().partition(RULE)
    found = planned(script)
    if os.environ.get("PDSERVE_WRITE_SCENARIOS"):
        path.write_text(script + RULE + found)
    assert found == expected
