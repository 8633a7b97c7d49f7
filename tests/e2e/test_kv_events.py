"""What routers of other stacks hear of a real worker and its pool node, and are told when they ask."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch

from pdserve.kvpool.protocol.kv_events import block_hash
from pdserve.pages import page_hashes
from tests.support.e2e.cluster import Router, Worker, eventually, http
from tests.support.e2e.prompts import PAGE, token_ids
from tests.support.e2e.site import POOL_EVENTS, WORKER_EVENTS, Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PROMPT = token_ids(977, 5 * PAGE + 10)
LOOKUP = "/v1/kv/lookup"
SOON_S = 60.0


@pytest.fixture(scope="module")
def router(site: Site, agg_worker: Worker, run_dir: Path) -> Iterator[Router]:
    with Router(run_dir, agg=[agg_worker], name="router-events") as router:
        yield router


class Blocks:
    """The blocks that SGLang's own decoder finds in a stream of events."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.stored: dict[int, list[int]] = {}
        """Tokens by block."""

    def hear(self, wanted: Collection[int], within_s: float = SOON_S) -> bool:
        """Listen until these blocks are stored. False: they were not in time."""
        deadline_s = time.monotonic() + within_s
        while not self.stored.keys() >= set(wanted):
            if time.monotonic() > deadline_s:
                return False
            if self._socket.poll(100):
                for event in self._decoder.decode(self._socket.recv_multipart()[2]).events:
                    if isinstance(event, BlockStored):
                        for at, block in enumerate(event.block_hashes):
                            self.stored[block] = event.token_ids[at * PAGE : (at + 1) * PAGE]
        return True


def test_the_pool_tells_of_the_blocks_that_the_worker_told_with_their_tokens(
    agg_worker: Worker, run_dir: Path
) -> None:
    blocks = [block_hash(page) for page in page_hashes(PROMPT, PAGE)]
    with zmq.Context() as context:
        pool = Blocks(context, f"ipc://{run_dir}/{POOL_EVENTS}")
        worker = Blocks(context, f"ipc://{run_dir}/{WORKER_EVENTS}")
        deadline_s = time.monotonic() + SOON_S
        while not worker.hear(blocks, 1.0):  # its publisher may not have heard of us yet
            assert time.monotonic() < deadline_s
            agg_worker.flush()
            agg_worker.generate(PROMPT, 1)
        assert pool.hear(blocks)
        assert [worker.stored[block] for block in blocks] == [
            PROMPT[at : at + PAGE] for at in range(0, 5 * PAGE, PAGE)
        ]
        assert all(pool.stored[block] == [] for block in blocks)
        context.destroy(linger=0)


def test_a_prompt_is_looked_up(router: Router, agg_worker: Worker) -> None:
    agg_worker.generate(PROMPT, 1)

    def ask(**body: Any) -> Any:
        answer = http.post(f"{router.url}{LOOKUP}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    eventually(lambda: ask(input_ids=PROMPT)["tokens"] == 5 * PAGE, "the pages are in the pool", SOON_S)
    said = ask(input_ids=PROMPT)
    assert said["memory_tokens"] == 5 * PAGE
    assert (said["prompt_tokens"], said["prompt_pages"], said["page_tokens"]) == (len(PROMPT), 5, PAGE)
    assert said["tiers"] == {"dram": 5}
    pages = page_hashes([*PROMPT[: 3 * PAGE], *token_ids(978, 2 * PAGE)], PAGE)
    assert ask(hashes=[page.hex() for page in pages])["tokens"] == 3 * PAGE
    assert ask(input_ids=PROMPT, cache_salt="another")["tokens"] == 0
    text = {"messages": [{"role": "user", "content": "How much of this does the pool have?"}]}
    assert ask(**text)["tokens"] == 0
    assert http.post(f"{router.url}{LOOKUP}", json={}).status_code == 400
