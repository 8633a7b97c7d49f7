"""The installed SGLang has all that pdserve uses of it, and another version ends a start in one line."""

from __future__ import annotations

from importlib import metadata

import pytest

from pdserve.engine.sglang import selfcheck
from pdserve.errors import StartupError
from tests.support.sglang_symbols import TABLE, misfits


def test_the_installed_sglang_has_every_name_that_is_used() -> None:
    assert list(misfits(TABLE.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gone", "is not there"),
        ("Req.gone", "is not there"),
        ("Req.__init__(rid, gone)", "takes no gone"),
        ("Req.__init__ sets rid, gone", "has no gone"),
        ("Req.__init__ uses rid, gone", "has no gone"),
    ],
)
def test_a_name_that_is_gone_is_found(line: str, said: str) -> None:
    module = "sglang.srt.managers.schedule_batch"
    [found] = misfits(f"{module}\n    {line}\n")
    assert found.startswith(module)
    assert found.endswith(said)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"sglang": "9.9.9"}, "SGLang 9.9.9 is installed, and this pdserve is made for 0.5.23"),
        ({"torch": "1.2.3+cpu"}, "torch 1.2.3+cpu is installed, but SGLang 0.5.23 needs another"),
    ],
)
def test_another_version_ends_the_start(
    versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with torch 2.9 below SGLang 0.5.23: its tree core read wrong types at the first prompt."""
    selfcheck.check()
    monkeypatch.setattr(selfcheck, "version", lambda name: versions.get(name) or metadata.version(name))
    with pytest.raises(StartupError) as refused:
        selfcheck.check()
    assert str(refused.value).startswith(said)
