"""Where figures come from: the first line of every kept result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

CHANGES: Final = (
    "status",
    "--porcelain",
    "-uno",
    "--",
    ":/",
    ":(top,exclude)benchmarks/results",
    ":(top,exclude)README.md",
    ":(top,exclude)docs",
)
KEY_OPTION: Final = "--api-key"
PEERS: Final = ("mooncake-transfer-engine-non-cuda", "redis", "sglang-router", "smg", "vllm-router")
SITE: Final = "lib/python*/site-packages"
LOADERS: Final = ("fastsafetensors", "runai-model-streamer")
PACKAGES: Final = ("sglang", "torch", "ucxx-cu13", "numpy", *PEERS, *LOADERS)


def provenance(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Date, commit, machine, command and versions, as kept under `benchmarks/results`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "machine": _machine(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "command": " ".join(["pdserve", *without_keys(sys.argv[1:])]),
        "versions": {"python": platform.python_version(), **installed(packages)},
    }


def in_words(origin: Mapping[str, Any]) -> str:
    """An origin for people, in a line."""
    return f"{origin['command']} (commit {origin['commit'] or 'unknown'}, {origin['date']})"


def without_keys(words: Sequence[str]) -> list[str]:
    """A command line as it may be kept: what stands for API keys is blanked."""
    shown = [f"{KEY_OPTION}=..." if word.startswith(f"{KEY_OPTION}=") else word for word in words]
    for number, word in enumerate(words[:-1]):
        if word == KEY_OPTION:
            shown[number + 1] = "..."
    return shown


def _machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in _text("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    memory_gb = psutil.virtual_memory().total / 2**30
    cores = psutil.cpu_count() or 0
    processor = names[0] if names else platform.machine()
    return f"{cores} cores of {processor}, {memory_gb:.0f} GiB, {platform.system()}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _commit() -> str:
    """Of the checkout that this runs from; empty where there is none. A + says that it was changed since,
    results and documents aside.
    """
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git(*CHANGES) else "")
    except OSError:
        return ""


def installed(packages: Sequence[str], environment: Path | None = None) -> dict[str, str]:
    """Versions of those that are installed: here, or in another virtual environment."""
    there = sys.path if environment is None else [str(path) for path in environment.glob(SITE)]
    found: dict[str, str] = {}
    for package in packages:
        for one in importlib.metadata.distributions(name=package, path=there):
            found.setdefault(package, one.version)  # what is imported is the first
    return found
