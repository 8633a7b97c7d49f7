"""Containerfile: linted, and built without a daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import __version__
from tests.support.e2e.cluster import free_port, http, http_ok
from tests.support.image import ROOT, Builder
from tests.support.random_model import make_random_model

NONE, CPU = "localhost/pdserve:none", "localhost/pdserve:cpu"
BUILD = "PDSERVE_BUILD_IMAGE"
"""`none` or `cpu`: the engine of the image to build. With SGLang it takes many minutes and 30 GB of disk."""


CLUSTER = """
[cluster]
name = "image"

[router]
port = {port}

[worker.engine]
model_path = "/files/model"

[[pool]]
capacity_bytes = "256MiB"

[[agg]]
"""


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Containerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    copied = [
        word
        for line in (ROOT / "Containerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    kept = [line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    made = Builder(tmp_path_factory.mktemp("image"))
    made.make_base()
    return made


def asks_for(engine: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        os.environ.get(BUILD) != engine, reason=f"{BUILD} is not {engine}: this image is not built"
    )


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.timeout(1800)
@asks_for("none")
def test_an_image_without_an_engine_runs_routers_and_pool_nodes_as_a_user_who_is_nobody(
    builder: Builder,
) -> None:
    builder.build(NONE, ENGINE="none")
    config = builder.config(NONE)
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["tini", "--", "pdserve"]
    assert builder.run(NONE, "id", "-u").strip() == "1000"
    assert builder.run(NONE, "tini", "--", "pdserve", "--version").strip().endswith(__version__)
    for words in (("router",), ("pool", "serve"), ("pool", "drain"), ("doctor",)):
        assert "Usage" in builder.run(NONE, "pdserve", *words, "--help")
    packages = builder.run(
        NONE, "python", "-c", "import pkgutil; print([m.name for m in pkgutil.iter_modules()])"
    )
    assert "'torch'" not in packages
    assert "'pip'" not in packages or "'uv'" not in packages


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.timeout(5400)
@asks_for("cpu")
def test_an_image_for_cpu_runs_a_cluster_that_answers(builder: Builder, tmp_path: Path) -> None:
    builder.build(CPU, ENGINE="cpu")
    files = tmp_path / "files"
    make_random_model("tiny", files / "model", seed=0)
    (files / "cluster.toml").write_text(CLUSTER.format(port=(port := free_port())))
    log = tmp_path / "log"
    words = ("tini", "--", "pdserve", "up", "/files/cluster.toml", "--run-dir", "/tmp/run")
    with builder.running(CPU, log, {files: "/files"}, *words) as cluster:
        cluster.wait_ready(lambda: http_ok(f"http://127.0.0.1:{port}/ready"))
        body = {"model": "model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert builder.end(cluster, "tini") == 0, cluster.tail()
        assert "agg0 has stopped" in cluster.tail()
