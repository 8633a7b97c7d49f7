"""`python -m benchmarks weights-load` on a model of this run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pool.weights_load import measure as module
from benchmarks.pool.weights_load.loading_process import Loaded, LoadJob
from benchmarks.stores import BenchError
from docs.generate.benchmarks import pool as page
from docs.generate.benchmarks.results import Run
from pdserve.engine.demo.model import make_demo_model
from tests.support.bench.commands import assert_refused, bench, results

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_demo_model("tiny", directory)
    return directory


def test_every_source_gives_the_same_tensors_and_a_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", str(model), "--sources", "disk,ssd,object", "--rounds", "1", "--capacity", "512MiB")
    done = bench("weights-load", *words, "--directory", str(tmp_path), "--json")
    *rows, limits = results(done)
    origin = json.loads(done.stdout.splitlines()[0])
    assert origin["load"] == "weights of tiny"
    assert [(row["source"], row["loader"]) for row in rows if row["loader"] in ("auto", "pool")] == [
        ("disk", "auto"),
        ("ssd", "pool"),
        ("object", "pool"),
    ]
    assert all(row["gbps"] > 0 and row["size_bytes"] > 1_000_000 for row in rows)
    assert min(limits["memcpy_gbps"], limits["memcpy_fresh_gbps"], limits["disk_gbps"]) > 0
    monkeypatch.setattr(page, "runs", lambda kind: [Run(origin, [*rows, limits], ("raw.jsonl",))])
    assert "| ssd | pool |" in page.weights_load()


def test_other_tensors_are_no_result(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["one", "another"])

    def load(*_: object) -> Loaded:
        return Loaded(seconds=1.0, first_s=0.1, size_bytes=10, digest=next(digests))

    monkeypatch.setattr(module, "_load", load)
    with pytest.raises(BenchError, match="different tensors"):
        module.measure(model, ["cached"], 2, "1GiB", tmp_path, lambda _: None)


def test_a_loader_of_others_that_does_not_run_here_is_left_out_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, said = ["fastsafetensors"], []

    def load(job: LoadJob, *_: object) -> Loaded:
        if job.loader in broken:
            raise BenchError(f"{job.loader} found no GPU library")
        return Loaded(seconds=1.0, first_s=0.1, size_bytes=10, digest="one")

    monkeypatch.setattr(module, "_load", load)
    monkeypatch.setattr(module, "is_installed", lambda _: True)
    (first := tmp_path / "first").mkdir()
    rows, _ = module.measure(model, ["disk"], 2, "1GiB", first, said.append)
    assert [row.loader for row in rows] == ["auto", "runai_streamer"]
    assert any("fastsafetensors found no GPU library" in line for line in said)
    broken.append("auto")
    with pytest.raises(BenchError, match="auto found no GPU library"):
        module.measure(model, ["disk"], 2, "1GiB", tmp_path, said.append)


def test_a_source_that_is_none_is_refused(model: Path) -> None:
    assert_refused("'floppy' is not one of", "weights-load", "--model", str(model), "--sources", "floppy")
