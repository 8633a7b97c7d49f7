"""What a worker says of its own start, and what of SGLang's first lines it leaves out.

The start takes long, so a line says each time what is going on. SGLang configures logging while it starts;
these lines are shown whatever level it sets, in its format once it has one.
"""

from __future__ import annotations

import logging
from typing import Final

START: Final = logging.getLogger("pdserve.start")
"""The steps of a start, for people."""

NO_NEWS: Final = {
    "sglang.srt.utils.common": ("Fail to set RLIMIT_NOFILE",),
    "sglang.srt.arg_groups.attention_hook": ("Cuda graph is disabled because of using torch native",),
    "sglang.srt.distributed.bootstrap": ("init_cpu_threads_env and shared memory based AllReduce",),
}
"""By SGLang's logger: how warnings begin that every worker on a CPU would show and nobody can act on. The
limit of open files is pdserve's own affair (`raise_open_files`).
"""


def show_start() -> None:
    """Show the lines of `START` from now on; called before SGLang is imported."""
    START.setLevel(logging.INFO)
    if not logging.root.handlers:
        logging.basicConfig(format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def leave_out_no_news() -> None:
    """Drop the warnings of `NO_NEWS`, in this process and its forked children, unless the level is debug."""
    for name, beginnings in NO_NEWS.items():
        logging.getLogger(name).addFilter(_Without(beginnings))


class _Without(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        return logging.root.isEnabledFor(logging.DEBUG) or not record.getMessage().startswith(
            self._beginnings
        )
