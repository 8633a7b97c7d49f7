"""Pages of prompts that are computed for the pool are kept, in SGLang's prefill mode too."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdserve.engine.sglang.children.kept_prompts import POOL_ROOM, keeping


@dataclass
class Request:
    bootstrap_room: int | None
    skip_radix_cache_insert: bool = True


@pytest.mark.parametrize(
    ("room", "is_kept"),
    [(None, False), (0, False), (POOL_ROOM - 1, False), (POOL_ROOM, True), (POOL_ROOM + 3, True)],
)
def test_only_prompts_for_the_pool_are_kept(room: int | None, is_kept: bool) -> None:
    """SGLang's own warm-ups are not."""
    request = Request(room)
    seen = []

    def create_sender(queue: object, req: Request, num_kv_heads: int) -> bool:
        seen.append((queue, req.skip_radix_cache_insert, num_kv_heads))
        return False

    assert keeping(create_sender)("queue", request, 8) is False
    assert seen == [("queue", not is_kept, 8)]
