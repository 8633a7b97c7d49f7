"""A pool client on another host, told what to do by lines of JSON on its standard input.

Run as `python -m tests.support.netns.guest ADDRESS NAME`. The commands are the methods of `Guest`, such as
`{"do": "get", "pages": [numbers]}`. One line answers each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from tests.support.kvpool import made_pages as p

SEED = 5
TIMEOUT_S = 2.0
TRAFFIC_PAGES = 16


class Guest:
    def __init__(self, address: str, name: str) -> None:
        config = PoolClientConfig(
            nodes=[PoolNodeRef(node="far", address=address)],
            connect_timeout_s=1.0,
            exists_timeout_s=1.0,
            get_timeout_s=TIMEOUT_S,
            put_timeout_s=TIMEOUT_S,
        )
        self._client = PoolClient(config, "netns", {"netns": "1"}, name=name)

    def connect(self, within_s: float) -> dict[str, Any]:
        """Loading UCX takes a busy machine longer than a client waits for a connection."""
        until = time.monotonic() + within_s
        while any((problems := self._client.check()).values()) and time.monotonic() < until:
            time.sleep(0.1)
        return {"problems": [str(problem) for problem in problems.values() if problem]}

    def put(self, pages: list[int]) -> dict[str, Any]:
        keys = [p.key_of(SEED, page) for page in pages]
        whole = [p.content(key, sum(p.segments_of(page))) for key, page in zip(keys, pages, strict=True)]
        began = time.monotonic()
        ok = self._client.put(keys, [p.segments(*each) for each in zip(whole, pages, strict=True)])
        return {"ok": ok, "took_s": time.monotonic() - began}

    def get(self, pages: list[int]) -> dict[str, Any]:
        keys = [p.key_of(SEED, page) for page in pages]
        whole = [np.zeros(sum(p.segments_of(page)), np.uint8) for page in pages]
        began = time.monotonic()
        ok = self._client.get(keys, [p.segments(*each) for each in zip(whole, pages, strict=True)])
        took_s = time.monotonic() - began
        right = [
            np.array_equal(p.content(key, found.nbytes), found)
            for key, found in zip(keys, whole, strict=True)
        ]
        wrong = sum(said and not true for said, true in zip(ok, right, strict=True))
        return {"ok": ok, "took_s": took_s, "wrong": wrong, "corrupt": self._client.counters.pages_corrupt}

    def exists(self, pages: list[int]) -> dict[str, Any]:
        began = time.monotonic()
        ok = self._client.exists([p.key_of(SEED, page) for page in pages])
        return {"ok": ok, "took_s": time.monotonic() - began}

    def traffic(self, rounds: int = 1 << 30) -> dict[str, Any]:
        """Batches of new pages, written and read, until one fails. 50 a second: what was there before is not
        evicted.
        """
        good = failed = wrong = done = 0
        longest_s = 0.0
        while done < rounds and not failed:
            first = time.monotonic_ns() // 1000 % 2**31 // p.LARGE_EVERY * p.LARGE_EVERY
            pages = [p.number(p.OWNED, 0, first + index * p.LARGE_EVERY) for index in range(TRAFFIC_PAGES)]
            put, got = self.put(pages), self.get(pages)
            longest_s = max(longest_s, put["took_s"], got["took_s"])
            good, failed = good + sum(got["ok"]), TRAFFIC_PAGES - sum(got["ok"])
            wrong += got["wrong"]
            done += 1
            time.sleep(0.02)
        return {"good": good, "failed": failed, "wrong": wrong, "longest_s": longest_s}


def main(address: str, name: str) -> None:
    guest = Guest(address, name)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(guest, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
