"""Around the imports of SGLang. No SGLang is imported."""

from __future__ import annotations

import gc

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
