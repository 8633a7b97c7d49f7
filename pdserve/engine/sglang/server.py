"""SGLang's own HTTP server, in this process, with our routes added and a quick, quiet end.

    with until_stopped():
        engine = Engine(drain, metrics)
        serve(parse_args(argv), drain, engine, certificates, bound, ...)  # until SIGTERM or Ctrl-C

The end: the worker drains (drain.py), unless one of SGLang's processes has failed. Then requests that still
run are aborted. The schedulers release their resources: a storage backend closes its connections. The HTTP
server stops, and every child is killed. Children end with this process even when it is killed outright, since
SGLang sets PR_SET_PDEATHSIG in each.

SGLang's own end (0.5.23, `sigterm_watchdog`) polls every 5 s, waits for running requests without a limit, and
accepts new ones meanwhile.

A worker is ready from its first generation on. SGLang (0.5.23) asks its own server over HTTP for a first
generation, after a second of sleep, and then to freeze its objects against garbage collection. That would
need the cluster's token, the worker's certificates, and an exception for this process in each check of a
request. Here the same requests go to the tokenizer manager itself. SGLang warms vision models with an image;
here the first image of such a worker pays for that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from pdserve.engine.drain import Client, Drain
from pdserve.engine.sglang.engine import Engine
from pdserve.engine.sglang.http_server import sglang_server
from pdserve.engine.sglang.prepare import START
from pdserve.engine.sglang.server_args import ranks_here
from pdserve.engine.sglang.tokenizer_manager import manager_class
from pdserve.errors import StartupError
from pdserve.resources.memory import GB, release_s
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

_ABORT_S = 1.0  # for aborted requests to be answered
_RELEASE_S = 2.0  # for schedulers to release what they hold
_STOP_S = 6.0  # beyond the drain, after which the process ends without asking again
_POLL_S = 0.05


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """SIGTERM and SIGINT end the block quietly, wherever it stands. Main thread only."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    server_args: Any,
    drain: Drain,
    engine: Engine,
    certificates: Certificates,
    bound: list[socket.socket],
    *,
    configure_app: Callable[[Any], None],
    on_ready: Callable[[], None],
) -> None:
    """Run SGLang's server until it is stopped; this process must have been prepared (`prepare.choose`).
    With `--node-rank` over 0 there is no server: this host's ranks follow those of the first host.

    `bound`: where it listens (`bind_address`). `configure_app` gets SGLang's FastAPI app when SGLang's
    processes run and before the server does; it may start threads, which nothing before it may
    (children/forked.py). `on_ready` is called once a first generation has gone through. Raises StartupError
    when SGLang does not start or one of its processes dies.
    """
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import kill_process_tree

    from pdserve.engine.sglang.children import entry, forked

    entry.install()
    forked.install(engine_module, server_args, bound)
    engine.app = app
    held_s = release_s(server_args.hicache_size * GB * ranks_here(server_args))
    ending = _Ending(drain, held_s)
    drain.add(lambda: ending.unfinished)

    def init_manager(*args: Any, **kwargs: Any) -> Any:
        # By now the children run, and SGLang's own handler, which kills this process outright, is in place.
        signal.signal(signal.SIGQUIT, _child_failed)
        kwargs["TokenizerManagerClass"] = manager_class()
        manager, templates = engine_module.init_tokenizer_manager(*args, **kwargs)
        manager.signal_handler_class = ending.handler_class()
        engine.begin(manager)
        configure_app(app)
        return manager, templates

    async def first() -> None:
        engine.take_places()
        try:
            await warm_up(engine.tokenizer_manager)
        # boundary: a task that nobody awaits; the worker ends as by the failure of one of its processes
        except Exception as error:
            logger.error("the first generation failed: %s", str(error) or type(error).__name__)  # noqa: TRY400
            ending.failed = True
            ending.begin(engine.tokenizer_manager)
            return
        if not ending.is_under_way:
            engine.has_started = True
            on_ready()

    try:
        launched = engine_module.Engine._launch_subprocesses(
            server_args, init_manager, entry.run_scheduler_process, entry.run_detokenizer_process
        )
        if not server_args.node_rank:  # else its ranks have ended with those of the first host
            sglang_server(server_args, launched, certificates, bound, first).run()
    except (RuntimeError, ValueError, AssertionError) as error:  # what SGLang raises for what it cannot run
        what = "ended" if engine.has_started else "did not start"
        raise StartupError(f"SGLang {what}: {_first_line(error)}") from error
    finally:
        ending.over()
        with contextlib.suppress(RuntimeError):  # a child that cannot be reaped in time
            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=_RELEASE_S + held_s)
    if ending.failed:
        raise StartupError("SGLang ended: one of its processes failed, its last words are above")


def clients() -> set[Client]:
    """The clients that hold a connection to this process."""
    import psutil

    found = psutil.Process().net_connections("tcp")
    return {(c.raddr.ip, c.raddr.port) for c in found if c.raddr and c.status == psutil.CONN_ESTABLISHED}


def _child_failed(signum: int, _frame: FrameType | None) -> None:
    """Each rank that fails says so. The first one ends the start. Others may not break off what follows."""
    signal.signal(signum, signal.SIG_IGN)
    raise StartupError("SGLang did not start: one of its processes failed, its last words are above")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Ending:
    """The end of a running server: once, bounded in time, in SGLang's order."""

    def __init__(self, drain: Drain, held_s: float) -> None:
        """`held_s`: what schedulers take to give back pinned memory."""
        self.failed = False
        self._drain = drain
        self._held_s = held_s
        self._manager: Any = None
        self._task: asyncio.Task[None] | None = None
        self._last_resort: threading.Timer | None = None

    def handler_class(self) -> Callable[[Any], Any]:
        """In place of SGLang's SignalHandler, which SGLang instantiates in its event loop."""
        ending = self

        class Handler:
            def __init__(self, manager: Any) -> None:
                self._manager = manager
                # SGLang registers SIGTERM and SIGQUIT itself
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.sigterm_handler)

            def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
                ending.begin(self._manager)

            def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
                ending.failed = True
                ending.begin(self._manager)

        return Handler

    @property
    def unfinished(self) -> int:
        """The number of requests that SGLang has."""
        return len(self._manager.rid_to_state)

    @property
    def is_under_way(self) -> bool:
        """The end has begun."""
        return self._task is not None

    def begin(self, manager: Any) -> None:
        """Start the end, in the event loop; again ends the drain at once."""
        loop = asyncio.get_running_loop()
        self._manager = manager
        self._drain.begin(time.monotonic())
        self._give_up_in(self._drain.left_s(time.monotonic()) + _STOP_S + self._held_s)
        if self._task is None:
            self._task = loop.create_task(self._end(manager))

    def _give_up_in(self, seconds: float) -> None:
        self.over()
        self._last_resort = threading.Timer(seconds, self._give_up)
        self._last_resort.daemon = True
        self._last_resort.start()

    def over(self) -> None:
        """The server has returned: nothing is left to force."""
        if self._last_resort is not None:
            self._last_resort.cancel()

    async def _end(self, manager: Any) -> None:
        from sglang.srt.managers.io_struct import ShutdownReq

        while not self.failed and not self._drain.is_over(time.monotonic()):  # noqa: ASYNC110 - by many causes
            await asyncio.sleep(_POLL_S)
        self._drain.is_closed = True
        self._give_up_in(_STOP_S + self._held_s)
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()  # children that end now are no crash
        if not self.failed:
            manager.abort_request(abort_all=True)  # such answers are broken off (`Engine.begin`)
            await _until(lambda: not manager.rid_to_state, _ABORT_S)
            manager._dispatch_to_scheduler(ShutdownReq())
            await _until(lambda: not _schedulers(), _RELEASE_S + self._held_s)
        if manager._server_stop_hook is not None:
            manager._server_stop_hook()

    def _give_up(self) -> None:
        from sglang.srt.utils import kill_process_tree

        logger.warning("connections that are still open are cut")
        with contextlib.suppress(RuntimeError):  # a child that cannot be reaped in time
            kill_process_tree(os.getpid(), include_parent=False, wait_timeout=_RELEASE_S + self._held_s)
        os._exit(1 if self.failed else 0)


def _schedulers() -> list[Any]:
    import psutil

    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "sglang::scheduler" in " ".join(
                process.cmdline()
            ):
                running.append(process)
    return running


async def _until(done: Callable[[], bool], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not done() and loop.time() < deadline_s:  # noqa: ASYNC110  nothing announces either
        await asyncio.sleep(_POLL_S)


TIMEOUT_S: Final = 1800.0  # SGLang's own for a disaggregated warm-up: GPU kernels compile meanwhile
_TOKENS: Final = (10, 11, 12, 13)


async def warm_up(manager: Any) -> None:
    """Generate a few tokens on each data-parallel rank of SGLang's tokenizer manager. Raises TimeoutError,
    and what the generation raises.
    """
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    START.info("warming up")
    ranks = range(int(manager.elastic_worker_count))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(_whole(manager, _request(manager, rank)) for rank in ranks))
            await manager.freeze_gc()
    except TimeoutError:
        raise TimeoutError(f"no token within {TIMEOUT_S:.0f} s") from None
    manager.server_status = ServerStatus.Up


async def _whole(manager: Any, request: Any) -> None:
    async for _ in manager.generate_request(request, None):
        pass


def _request(manager: Any, rank: int) -> Any:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    if not manager.is_generation:
        return EmbeddingReqInput(input_ids=[*_TOKENS])
    request = GenerateReqInput(
        input_ids=[*_TOKENS],
        sampling_params={"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
        routed_dp_rank=rank,
    )
    if manager.server_args.disaggregation_mode != "null":  # a direct hand-off has no partner for this one
        request.bootstrap_host, request.bootstrap_room = FAKE_BOOTSTRAP_HOST, rank
    return request
