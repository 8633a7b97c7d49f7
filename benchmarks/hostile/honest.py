"""Honest clients: one request at a time, at a steady rate. A request's time counts from its planned moment,
and every so manieth opens a new connection.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import msgspec
import numpy as np

from benchmarks.hostile.attacks import CHAT, GEOMETRY, HOST, PAGE_BYTES
from benchmarks.router.mock import MODEL
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.protocol.base import KEY_BYTES

RATE_S: Final = 200.0
NEW_EVERY: Final = 4
CHAT_TIMEOUT_S: Final = 10.0
NAMESPACE: Final = "honest"


class Done(msgspec.Struct):
    """Of one kind of requests in one phase. `missed`: those that were not answered as they should be."""

    times_s: list[float] = []
    missed: int = 0


Phase = Callable[[float], dict[str, Done]]
"""What was done in so many seconds, by kind of request."""


def pool_client(config: PoolClientConfig) -> PoolClient:
    """It connects when it is first used."""
    return PoolClient(config, NAMESPACE, GEOMETRY, name="honest")


def pool_phase(config: PoolClientConfig, keys: list[bytes]) -> Phase:
    """Gets of these pages, which are there, and puts of new ones, in turn."""

    def phase(seconds: float) -> dict[str, Done]:
        page = np.empty(PAGE_BYTES, np.uint8)
        with closing(pool_client(config)) as lasting:
            lasting.get(keys[:1], [(page,)])

            def one(turn: int) -> tuple[str, bool]:
                is_fresh = turn // 2 % NEW_EVERY == 0
                client = pool_client(config) if is_fresh else lasting
                try:
                    if turn % 2:
                        return "put", client.put([os.urandom(KEY_BYTES)], [(page,)])[0]
                    return "get", client.get([keys[turn // 2 % len(keys)]], [(page,)])[0]
                finally:
                    if is_fresh:
                        client.close()

            return _at_a_rate(one, seconds)

    return phase


def chat_phase(port: int, key: str) -> Phase:
    """Chats, each with an answer in one piece."""
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def connection() -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, port, timeout=CHAT_TIMEOUT_S)

    def phase(seconds: float) -> dict[str, Done]:
        with closing(connection()) as lasting:

            def one(turn: int) -> tuple[str, bool]:
                is_fresh = turn % NEW_EVERY == 0
                client = connection() if is_fresh else lasting
                try:
                    client.request("POST", CHAT, body, headers)
                    answer = client.getresponse()
                    return "chat", answer.status == 200 and bool(answer.read())
                except (OSError, http.client.HTTPException):
                    client.close()  # the next request connects again
                    return "chat", False
                finally:
                    if is_fresh:
                        client.close()

            return _at_a_rate(one, seconds)

    return phase


def _at_a_rate(one: Callable[[int], tuple[str, bool]], seconds: float) -> dict[str, Done]:
    """`one(its number)` does a request, and says of which kind it was and whether it was served."""
    done: dict[str, Done] = {}
    planned_s = began_s = time.monotonic()
    turn = 0
    while planned_s < began_s + seconds:
        planned_s += 1 / RATE_S
        time.sleep(max(0.0, planned_s - time.monotonic()))
        what, served = one(turn)
        of_kind = done.setdefault(what, Done())
        of_kind.times_s.append(time.monotonic() - planned_s)
        of_kind.missed += not served
        turn += 1
    if not done:
        raise BenchError("a phase was too short for one request")
    return done
