"""The first generation of a worker, from which on it is ready.

SGLang (0.5.23) asks its own server over HTTP for a first generation, after a second of sleep, and then to
freeze its objects against garbage collection. That would need the cluster's token, the worker's
certificates, and an exception for this process in each check of a request. Here the same requests go to the
tokenizer manager itself. SGLang warms vision models with an image; here the first image of such a worker pays
for that.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from pdserve.engine.sglang.prepare import START

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
