"""Ranks of SGLang that fail while they start: each sends SIGQUIT to the process that started them."""

from __future__ import annotations

import os
import signal

import pytest

from pdserve.engine.sglang import server
from pdserve.errors import StartupError


def test_a_second_rank_that_fails_does_not_break_off_the_clean_up_after_the_first() -> None:
    before = signal.signal(signal.SIGQUIT, server._child_failed)
    try:
        with pytest.raises(StartupError, match="one of its processes failed"):
            signal.raise_signal(signal.SIGQUIT)
        os.kill(os.getpid(), signal.SIGQUIT)
    finally:
        signal.signal(signal.SIGQUIT, before)
