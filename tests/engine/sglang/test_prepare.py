"""Around the imports of SGLang. No SGLang is imported."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from pdserve.engine.sglang import prepare


def test_garbage_is_collected_again_after_the_imports_however_they_end() -> None:
    with prepare.without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), prepare.without_gc():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


def test_a_worker_imports_nothing_too_early() -> None:
    """SGLang and torch wait for the choice of a device, prometheus_client for SGLang's multi-process mode."""
    code = """
import sys
import pdserve.engine.launch, pdserve.engine.sglang.children.entry
print([name for name in ("sglang", "torch", "prometheus_client") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
