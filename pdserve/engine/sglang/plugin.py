"""SGLang plugin (entry-point group `sglang.srt.plugins`), called in every SGLang process on this Python
installation.

It lets SGLang read models of a pool (`--model-path pdserve://...`). All else it does only in processes of a
pdserve worker on a machine without an accelerator: those whose environment carries the worker's choice of
device. SGLang only logs what a plugin raises, so the worker's self-check is
what stops a bad start.
"""

from __future__ import annotations

from pdserve.engine.sglang import prepare


def register() -> None:
    """Let SGLang read models of a pool; put the CPU hooks in place where a pdserve worker chose the CPU."""
    prepare.after_sglang()
