"""A pool node of the simplest kind, to test the UCX data path alone: no leases, and at the end of its memory
new pages go over the first ones.

Run as a process: `python ucx_node.py SOCKET ARENA_BYTES`. Prints "ready".
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from pdserve.kvpool.core.events import FIRST_TAG, CancelTransfers, StartReceive, StartSend, TransferDone
from pdserve.kvpool.node.ucx import worker
from pdserve.kvpool.node.ucx.server import UcxServer
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame


class TinyNode:
    """Reserve, Commit, Abort, Get, Release, Ping and Status over one Unix socket."""

    def __init__(self, arena_bytes: int) -> None:
        self.arena = np.zeros(arena_bytes, np.uint8)
        self.server = UcxServer(self.arena, self.done, self.lost, stall_timeout_s=60)
        self.free_offset = 0
        self.next_tag = FIRST_TAG
        self.next_connection = 1
        self.reserved: dict[
            int, tuple[bytes, int, int, int]
        ] = {}  # sequence: key, offset, length, connection
        self.pages: dict[bytes, tuple[int, int, int]] = {}  # key: offset, length, checksum
        self.received: dict[int, bool] = {}  # tag (= sequence): ok
        self.commits: list[tuple[int, m.Commit]] = []
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.counters = {"sent": 0, "send_failed": 0, "received": 0, "receive_failed": 0, "lost": 0}
        self.sending: set[int] = set()

    def done(self, done: list[TransferDone]) -> None:
        for one in done:
            kind = "send" if one.tag in self.sending else "receive"
            self.sending.discard(one.tag)
            if kind == "receive":
                self.received[one.tag] = one.ok
            name = {"send": "sent", "receive": "received"}[kind] if one.ok else f"{kind}_failed"
            self.counters[name] += 1
        self.answer_commits()

    def lost(self, connection: int, reason: str) -> None:
        self.counters["lost"] += 1
        if connection in self.writers:
            self.writers[connection].close()

    def answer_commits(self) -> None:
        waiting = []
        for connection, commit in self.commits:
            if not all(sequence in self.received for sequence in commit.sequences):
                waiting.append((connection, commit))
                continue
            mask = bytearray()
            for sequence, checksum in zip(commit.sequences, commit.checksums, strict=True):
                key, offset, length, _ = self.reserved.pop(sequence)
                mask.append(self.received[sequence])
                if self.received[sequence]:
                    self.pages[key] = (offset, length, checksum)
            self.send(connection, m.Committed(commit.id, bytes(mask)))
        self.commits = waiting

    def send(self, connection: int, message: m.Reply) -> None:
        if connection in self.writers:
            self.writers[connection].write(encode_frame(message))

    def tags(self, count: int) -> int:
        tag = self.next_tag
        self.next_tag += count
        return tag

    def handle(self, connection: int, request: m.Request) -> None:
        if isinstance(request, m.Reserve):
            grants = [self.grant(connection, key, tuple(request.segment_bytes)) for key in request.keys]
            self.send(connection, m.Reserved(request.id, grants))
        elif isinstance(request, m.Commit):
            self.commits.append((connection, request))
            self.answer_commits()
        elif isinstance(request, m.Abort):
            self.server.perform(connection, [CancelTransfers(connection, tuple(request.sequences))])
        elif isinstance(request, m.Get):
            pins = [self.pin(connection, key, tuple(request.segment_bytes)) for key in request.keys]
            self.send(connection, m.Got(request.id, pins))
        elif isinstance(request, m.Status):
            report = m.StatusReport(request.id, "tiny", 1, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, [], self.counters)
            self.send(connection, report)

    def grant(self, connection: int, key: bytes, segment_bytes: tuple[int, ...]) -> m.Grant:
        tag, length = self.tags(len(segment_bytes)), sum(segment_bytes)
        offset = self.free_offset if self.free_offset + length <= len(self.arena) else 0
        self.free_offset = offset + length
        self.reserved[tag] = (key, offset, length, connection)
        self.server.perform(connection, [StartReceive(connection, tag, offset, segment_bytes)])
        return m.Grant(m.GRANTED, tag, offset, tag, tag)

    def pin(self, connection: int, key: bytes, segment_bytes: tuple[int, ...]) -> m.Pin:
        if key not in self.pages:
            return m.Pin(m.MISS)
        offset, _, checksum = self.pages[key]
        tag = self.tags(len(segment_bytes))
        self.sending.add(tag)
        self.server.perform(connection, [StartSend(connection, tag, offset, segment_bytes)])
        return m.Pin(m.HIT, tag, offset, checksum, tag, tag)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, self.next_connection = self.next_connection, self.next_connection + 1
        frames = FrameBuffer()
        try:
            while data := await reader.read(1 << 20):
                for body in frames.feed(data):
                    request = decode_request(body)
                    if isinstance(request, m.Hello):
                        self.writers[connection] = writer
                        info = await self.server.open(connection)
                        version = m.PROTOCOL_VERSION
                        self.send(connection, m.Welcome(version, "tiny", 1, "", "ucx", 30.0, ucx=info))
                    else:
                        self.handle(connection, request)
        except ConnectionError:
            pass
        finally:
            self.writers.pop(connection, None)
            self.server.close(connection)
            writer.close()

    async def run(self, path: str) -> None:
        await self.server.load()
        async with await asyncio.start_unix_server(self.serve, path) as listening:
            print("ready", flush=True)
            await listening.serve_forever()


async def main(path: str, arena_bytes: int) -> None:
    await TinyNode(arena_bytes).run(path)


if __name__ == "__main__":
    worker.SWEEP_S = 0.25  # type: ignore[misc]
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
