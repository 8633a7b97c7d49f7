"""Runs `pdserve` in this process, which saves the second that another needs to start."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeAlias
from unittest.mock import patch

import pytest

from pdserve.cli import main

Done: TypeAlias = subprocess.CompletedProcess[str]


def pdserve_here(*words: str, **environment: str) -> Done:
    """`environment`: variables that differ from this process's."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["pdserve", *words]),
        patch.dict(os.environ, environment),
        pytest.raises(SystemExit) as ended,
    ):
        main(list(words))
    status = ended.value.code
    assert status is None or isinstance(status, int)
    said = (one.buffer.getvalue().decode() for one in (out, err))
    return Done(words, status or 0, *said)
