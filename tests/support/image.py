"""Images built without a daemon: buildah, whose steps run in a chroot, on a base that mmdebstrap makes of
Debian's packages. No registry of images is asked.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
BASE: Final = "localhost/base"
SUITE: Final = "bookworm"
RUN: Final = ("run", "--isolation", "chroot")
STEP_TIMEOUT_S: Final = 3000
AUTHORITIES: Final = Path("/usr/local/share/ca-certificates")
"""Of this machine, where package registries are reached through a proxy with an authority of its own."""
UV: Final = Path("/etc/uv/uv.toml")


class Builder:
    """Images below a directory."""

    def __init__(self, directory: Path) -> None:
        for program in ("buildah", "mmdebstrap"):
            if shutil.which(program) is None:
                pytest.fail(f"{program} is missing: apt-get install {program}")
        self._options = ["--root", str(directory / "root"), "--runroot", str(directory / "run")]
        self._directory = directory

    def make_base(self) -> None:
        """A minimal Debian."""
        tar = self._directory / "base.tar"
        _run("mmdebstrap", "--quiet", "--variant=minbase", SUITE, str(tar))
        (self._directory / "Base").write_text("FROM scratch\nADD base.tar /\n")
        self._build(BASE, self._directory, "Base")
        tar.unlink()

    def build(self, tag: str, **arguments: str) -> None:
        """The image of Containerfile."""
        words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self._build(
            tag,
            ROOT,
            "Containerfile",
            "--build-arg",
            f"BASE={BASE}",
            *words,
            *_reach_packages(self._directory),
        )

    def config(self, tag: str) -> dict[str, Any]:
        """What the image says of its containers."""
        made: dict[str, Any] = json.loads(self._buildah("inspect", "--type", "image", tag))
        return made["OCIv1"]["config"]

    def run(self, tag: str, *command: str) -> str:
        """What a command prints in a container of the image, as the image's user."""
        with self._container(tag) as container:
            return self._buildah(*RUN, container, "--", *command)

    @contextmanager
    def _container(self, tag: str) -> Iterator[str]:
        """The name of a new container of the image, for the block."""
        container = self._buildah("from", "--pull-never", tag).strip()
        try:
            yield container
        finally:
            self._buildah("rm", container)

    def _build(self, tag: str, context: Path, file: str, *words: str) -> None:
        fixed = ("--isolation", "chroot", "--pull-never", "--layers=false", "--tag", tag)
        self._buildah("build", *fixed, *words, "--file", str(context / file), str(context))

    def _buildah(self, *words: str) -> str:
        return _run("buildah", *self._options, *words)


def _reach_packages(directory: Path) -> list[str]:
    """How this machine reaches package registries, for the steps of a build. Containerfile has none of it."""
    (directory / "uv.toml").write_text("system-certs = true\n")  # the system's authorities
    found = {str(path): str(path) for path in (Path("/etc/pip.conf"), AUTHORITIES) if path.exists()}
    found[str(directory / "uv.toml")] = str(UV)
    return [f"--volume={source}:{place}:ro" for source, place in found.items()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
