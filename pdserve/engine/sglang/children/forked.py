"""SGLang's scheduler and detokenizer are forked from this process on a CPU, where SGLang would spawn them.

A spawned child imports torch and all of SGLang again, which takes 15 s of a core. A forked child has the
modules already and shares their memory. Children are spawned on a GPU, where this process may have a CUDA
context, and with data parallelism, whose controller starts ranks from its own threads.

A fork copies only the calling thread, so no other thread may run here: a lock that it holds would stay locked
in the child. For the same reason nothing may have computed with OpenMP in this process: the child would wait
for threads that it does not have.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pdserve.engine.sglang import prepare

logger = logging.getLogger(__name__)

_TASKS: Final = Path("/proc/self/task")


def install(engine: Any, server_args: Any, bound: list[socket.socket]) -> None:
    """Have SGLang's module of launches (`sglang.srt.entrypoints.engine`) fork, where that works. `bound`: the
    sockets of this process's server, which children close.
    """
    if not prepare.is_on_cpu() or server_args.dp_size > 1 or server_args.tokenizer_worker_num > 1:
        return
    if more := _other_threads():
        logger.warning("SGLang's processes are spawned, which takes longer: threads run: %s", ", ".join(more))
        return
    resource_tracker.ensure_running()  # one for all, as of spawned children
    context = multiprocessing.get_context("fork")

    def process(target: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return context.Process(target=_enter, args=(bound, target, args, kwargs or {}))

    _share_tokenizers()
    engine.mp = SimpleNamespace(Process=process, Pipe=context.Pipe, set_start_method=lambda *_, **__: None)


def _share_tokenizers() -> None:
    """A tokenizer is loaded once, before the fork, where SGLang loads it five times in three processes."""
    original = importlib.import_module("sglang.srt.utils.hf_transformers.tokenizer").get_tokenizer
    loaded: dict[str, Any] = {}

    @functools.wraps(original)
    def get_tokenizer(name: str, *args: Any, **kwargs: Any) -> Any:
        key = repr((name, args, sorted(kwargs.items())))
        if key not in loaded:
            loaded[key] = original(name, *args, **kwargs)
        return loaded[key]

    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})
        if names.get("get_tokenizer") is original:
            names["get_tokenizer"] = get_tokenizer


def _enter(bound: list[socket.socket], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In the child: what a spawned one begins and ends with."""
    for one in bound:
        one.close()
    gc.freeze()  # the parent's objects stay where they are: a collection would copy their pages
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    atexit._clear()  # the parent's
    try:
        target(*(_own(arg) for arg in args), **kwargs)
    finally:
        atexit._run_exitfuncs()  # not done by multiprocessing for a forked child


def _own(arg: Any) -> Any:
    """SGLang's arguments, without what this process noted in them."""
    return pickle.loads(pickle.dumps(arg)) if type(arg).__module__.startswith("sglang.") else arg


def _other_threads() -> list[str]:
    """Names of threads besides this one. OpenBLAS (of numpy and scipy) ends its idle threads at a fork, so
    one child is forked and thrown away (20 ms) before they are counted.
    """
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    own = str(os.getpid())
    tasks = [task for task in _TASKS.iterdir() if task.name != own]
    return [(task / "comm").read_text(encoding="utf-8").strip() for task in tasks]
