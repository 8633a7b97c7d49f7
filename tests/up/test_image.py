"""Containerfile: linted, and built without a daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import __version__
from tests.support.image import ROOT, Builder

NONE = "localhost/pdserve:none"
BUILD = "PDSERVE_BUILD_IMAGE"
"""Set: the image without an engine is built, which takes buildah, mmdebstrap and minutes."""


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


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(BUILD not in os.environ, reason=f"{BUILD} is not set: no image is built")
def test_an_image_without_an_engine_runs_routers_and_pool_nodes_as_nobody(
    tmp_path: Path,
) -> None:
    builder = Builder(tmp_path)
    builder.make_base()
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
