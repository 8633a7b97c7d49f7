"""A detached storage backend takes with it what SGLang believes of its pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdserve.engine.sglang.children.detached import forgetting


@pytest.mark.parametrize("done", [True, False])
def test_beliefs_are_forgotten_where_the_backend_is_gone(done: bool) -> None:
    cleared: list[bool] = []
    cache = SimpleNamespace(storage_existence_cache=SimpleNamespace(clear=lambda: cleared.append(True)))
    assert forgetting(lambda _: (done, "said"))(cache) == (done, "said")
    assert bool(cleared) == done
