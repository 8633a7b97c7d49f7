"""The first generation of a worker, and the moment from which it is ready.

SGLang (0.5.23) asks its own server over HTTP for a first generation, after a second of sleep, and then to
freeze its objects against garbage collection. That would need the cluster's token, the worker's
certificates, and an exception for this process in each check of a request. Here the same requests go to the
tokenizer manager itself.

`WarmUp.run` is for SGLang's parameter `execute_warmup_func`. It also does what SGLang does after a warm-up,
and returns nothing, so that SGLang does no more. SGLang warms vision models with an image; here the first
image of such a worker pays for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from pdserve.engine.progress import START

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 1800.0  # SGLang's own for a disaggregated warm-up: GPU kernels compile meanwhile
_POLL_S: Final = 0.05
_TOKENS: Final = (10, 11, 12, 13)


class WarmUp:
    """Makes a server ready: `listening` in its event loop, `run` in a thread of its own."""

    def __init__(self, is_stopping: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        """`is_stopping`: the server ends, so nothing is waited for. `on_ready`: called once, in the thread of
        `run`, when the worker serves.
        """
        self._is_stopping = is_stopping
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening = threading.Event()

    def listening(self) -> None:
        """The server takes connections. Called in its event loop."""
        self._loop = asyncio.get_running_loop()
        self._listening.set()

    def run(self, manager: Any) -> None:
        """Generate a few tokens on each data-parallel rank of SGLang's tokenizer manager, then let requests
        in. A failure ends the worker as the failure of one of its processes does.
        """
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._listening.wait(_POLL_S):
            if self._is_stopping():
                return
        assert self._loop is not None
        START.info("warming up")
        future = asyncio.run_coroutine_threadsafe(_generate(manager), self._loop)
        try:
            self._await(future, deadline_s)
        except Exception as error:  # boundary: a thread of SGLang's, whose exceptions nobody would see
            logger.error("the first generation failed: %s", str(error) or type(error).__name__)  # noqa: TRY400
            os.kill(os.getpid(), signal.SIGQUIT)
            return
        if self._is_stopping():
            return
        manager.server_status = ServerStatus.Up
        self._on_ready()

    def _await(self, future: Future[None], deadline_s: float) -> None:
        """Raises what the generation raised, or TimeoutError."""
        while not self._is_stopping():
            if time.monotonic() > deadline_s:
                future.cancel()
                raise TimeoutError(f"no token within {TIMEOUT_S:.0f} s")
            with contextlib.suppress(TimeoutError):
                future.result(_POLL_S)
            if future.done():
                return future.result()
        future.cancel()
        return None


async def _generate(manager: Any) -> None:
    ranks = range(int(manager.elastic_worker_count))
    await asyncio.gather(*(_whole(manager, _request(manager, rank)) for rank in ranks))
    await manager.freeze_gc()


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
