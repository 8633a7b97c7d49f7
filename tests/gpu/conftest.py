"""Tests of a machine with one GPU: `python -m pytest -m gpu tests/gpu`. Without a GPU they are skipped.

PDSERVE_GPU_DEVICE=cpu lets the CPU stand for the GPU, to try the tests themselves; PDSERVE_GPU_MODEL takes
another model than the demo model; PDSERVE_GPU_ARGS adds flags of SGLang for all workers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.engine.device import Device

DEVICE: Device = "cpu" if os.environ.get("PDSERVE_GPU_DEVICE") == "cpu" else "cuda"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if DEVICE == "cuda" and not Path("/dev/nvidiactl").exists():
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU here"))


@pytest.fixture(scope="session")
def device() -> Device:
    return DEVICE
