"""Steps of a process before and after its first import of SGLang. A worker's environment, which its children
inherit, decides them.

A start takes long, so a line says each time what is going on. SGLang configures logging while it starts;
these lines are shown whatever level it sets, in its format once it has one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Final

from pdserve.engine.device import (
    ENGINE_ENV,
    IDLE_THREADS_ENV,
    NO_COMPILER_ENV,
    ONE_HOST_ENV,
    ONE_HOST_RANKS_ENV,
    SEVERAL_HOSTS_ENV,
    SGLANG_CPU_ENV,
    Device,
    cpu_ranks_env,
)

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


def choose(device: Device, *, several_hosts: bool = False) -> None:
    """Record the device for this process and its children, and prepare this process for importing SGLang.
    `several_hosts`: the ranks of the worker are not all on this one.
    """
    import setproctitle  # SGLang brings it: doctor runs without

    setproctitle.getproctitle()  # it finds the place of the title only while the environment is as it began
    os.environ[ENGINE_ENV] = device
    if several_hosts:
        os.environ[SEVERAL_HOSTS_ENV] = "1"
    else:
        for name, value in ONE_HOST_ENV.items():
            os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ[SGLANG_CPU_ENV] = "1"
        # nothing is compiled on CPU, and to import the compiler is a fifth of a start
        os.environ[NO_COMPILER_ENV] = "1"
        for name, value in IDLE_THREADS_ENV.items():
            os.environ.setdefault(name, value)
    before_sglang()


def prepare_ranks(ranks: int) -> None:
    """Prepare the environment of this host's ranks, scheduler processes that are not started yet: several
    that are all on this host stay on loopback, and on CPU they divide this process's cores.
    """
    if ranks > 1 and not has_several_hosts():
        for name, value in ONE_HOST_RANKS_ENV.items():
            os.environ.setdefault(name, value)
    if is_on_cpu():
        cores = sorted(os.sched_getaffinity(0))
        for name, value in cpu_ranks_env(ranks, cores, several_hosts=has_several_hosts()).items():
            os.environ.setdefault(name, value)


def has_several_hosts() -> bool:
    """This is a process of a worker whose ranks are on several hosts."""
    return SEVERAL_HOSTS_ENV in os.environ


def is_on_cpu() -> bool:
    """This is a process of a worker that runs on a CPU."""
    return os.environ.get(ENGINE_ENV) == "cpu"


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """No garbage collection in the block, and later none of the objects that it leaves.

    For imports of SGLang: they make millions of objects that stay. A quarter of the time would go into
    collections that look through them again and again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def before_sglang() -> None:
    """On CPU, install the `sgl_kernel` stand-in; elsewhere, or in no pdserve worker, do nothing."""
    if is_on_cpu():
        from pdserve.engine.sglang.cpu import stand_in

        stand_in.install()
        leave_out_no_news()
        # What has no CPU version says so once per process while SGLang is imported; here that is no news.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
        # nor is that there is no CUDA, or that there are more ranks than NUMA nodes
        for name in ("srt.models.registry", "srt.utils.numa_utils", "kernels.jit.utils.arch"):
            logging.getLogger(f"sglang.{name}").setLevel(logging.ERROR)


def after_sglang() -> None:
    """Let SGLang read models of a pool; on CPU, put the hooks in place. Imports SGLang."""
    from pdserve.engine.sglang import pool_weights

    pool_weights.install()
    if is_on_cpu():
        from pdserve.engine.sglang.cpu import hooks

        hooks.apply()


def load_plugins() -> None:
    """Put the hooks in place and let SGLang load its plugins, before anything reads its arguments."""
    after_sglang()
    from sglang.srt.plugins import load_plugins as load

    load()


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
