"""SGLang's engine in another program (`sglang.Engine`): its processes start as those of a worker do.

`prepare.choose` must have prepared the program, before it imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.engine.sglang.children import entry


def install(run_scheduler: Callable[..., Any] = entry.run_scheduler_process) -> None:
    """For all engines of this process. `run_scheduler`: of a module that imports `entry` before SGLang."""
    from sglang.srt.entrypoints.engine import Engine

    entry.install()
    Engine.run_scheduler_process_func = staticmethod(run_scheduler)
    Engine.run_detokenizer_process_func = staticmethod(entry.run_detokenizer_process)
