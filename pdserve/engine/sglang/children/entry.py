"""Entry points of SGLang's child processes.

SGLang spawns its scheduler and detokenizer: each child imports the module of its target function before
anything of SGLang. So importing this module prepares the process, and SGLang's own functions are imported
only when called.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from pdserve.engine.sglang import prepare
from pdserve.errors import StartupError

_TELLS_ERRORS: Final = ("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler",)  # logs what it passes on
_OURS: Final = f"{StartupError.__module__}.{StartupError.__qualname__}: "  # in the last line of a traceback

SWITCH_INTERVAL_S: Final = 0.0005
"""Storage threads wait this long for the interpreter beside a scheduler that computes in Python, not 5 ms."""

prepare.before_sglang()
if multiprocessing.parent_process() is not None:
    gc.disable()  # the function's arguments import most of SGLang; see prepare.without_gc


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process` with the same arguments, in a prepared process."""
    prepare_scheduler()(*args, **kwargs)


def prepare_scheduler() -> Callable[..., Any]:
    """Prepare this process; SGLang's `run_scheduler_process`."""
    with prepare.without_gc():
        _enter_child()
        from sglang.srt.managers.scheduler import run_scheduler_process as run

        _change_scheduler()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for name in (run.__module__, *_TELLS_ERRORS):
        logging.getLogger(name).addFilter(_without_traceback)
    prepared: Callable[..., Any] = run
    return prepared


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's `run_detokenizer_process` with the same arguments, in a prepared process."""
    with prepare.without_gc():
        _enter_child()
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    run(*args, **kwargs)


def run_data_parallel_controller_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name with the same arguments, in a prepared process."""
    with prepare.without_gc():
        _enter_child()
        from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process as run

    run(*args, **kwargs)


def run_scheduler_process_with_init_pipe(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name with the same arguments: it calls `run_scheduler_process` when the data
    parallel controller says so.
    """
    from sglang.srt.managers.data_parallel_controller import run_scheduler_process_with_init_pipe as run

    run(*args, **kwargs)


def install() -> None:
    """Have SGLang start the processes of data parallelism here too: it has no argument for them."""
    from sglang.srt.entrypoints import engine

    engine.run_data_parallel_controller_process = run_data_parallel_controller_process
    engine.run_scheduler_process_with_init_pipe = run_scheduler_process_with_init_pipe


def install_in_program(run_scheduler: Callable[..., Any] = run_scheduler_process) -> None:
    """Have every engine of another program (`sglang.Engine`) start its processes as those of a worker do.
    `prepare.choose` must have prepared the program, before it imports SGLang. `run_scheduler`: of a module
    that imports this one before SGLang.
    """
    from sglang.srt.entrypoints.engine import Engine

    install()
    Engine.run_scheduler_process_func = staticmethod(run_scheduler)
    Engine.run_detokenizer_process_func = staticmethod(run_detokenizer_process)


def _change_scheduler() -> None:
    from pdserve.engine.sglang.children import scheduler

    scheduler.change(is_on_one_host=not prepare.has_several_hosts())
    if prepare.is_on_cpu():
        from pdserve.engine.sglang.cpu import hooks

        hooks.apply(hooks.SCHEDULER_HOOKS)


def _enter_child() -> None:
    # The parent decides when children stop; a Ctrl-C or a group-wide SIGTERM reaches them too, and must not
    # end them first. They die with the parent by SGLang's own PR_SET_PDEATHSIG.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prepare.after_sglang()


def _without_traceback(record: logging.LogRecord) -> bool:
    """A lack of memory, and what a StartupError says, is the user's to mend, not a bug. One line says it."""
    if record.exc_info and isinstance(record.exc_info[1], StartupError):
        record.exc_info = None
    lines = record.getMessage().strip().splitlines()
    if len(lines) > 1 and ("Not enough" in lines[-1] or lines[-1].startswith(_OURS)):
        record.msg, record.args = lines[-1].removeprefix(_OURS), ()
    return True
