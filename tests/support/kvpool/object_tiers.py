"""Object store tiers for tests: in a directory, in moto's S3 server, or in one that misbehaves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from pdserve.kvpool.tiers.base import Option, PageName, SpaceFacts, TierPage, TierSettings
from pdserve.kvpool.tiers.object.tier import ObjectTier
from tests.support.kvpool.tier_tools import KIB, memory, name, page

SEGMENT = 256 * KIB
LENGTH = 12 * KIB
BUCKET = "kvpages"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "for-tests",
    "AWS_SECRET_ACCESS_KEY": "for-tests",
    "AWS_REGION": "us-east-1",
}


def shared_facts(space: int) -> SpaceFacts:
    """A namespace for each space, of the same number at all nodes."""
    return SpaceFacts(f"ns{space}", f"{space:016x}" * 2, 2)


class DirectoryObjectTier(ObjectTier):
    """Its bucket is a directory beside its spool. A space goes on after `forget_space`, as in other tiers."""

    def __init__(self, settings: TierSettings) -> None:
        options = {"url": f"file://{settings.path}/bucket", **settings.options}
        super().__init__(dataclasses.replace(settings, options=options, facts=shared_facts))

    def forget_space(self, space: int) -> None:
        super().forget_space(space)
        self.open_space(space)


class Node:
    """A node's object tier. `found`, `lost`, `left`: what it reported."""

    def __init__(self, path: Path, url: str, **options: Option) -> None:
        self.path = path
        self.options: dict[str, Option] = {
            "url": url,
            "segment_bytes": SEGMENT,
            "spool_bytes": 4 * SEGMENT,
            "flush_s": 0.001,
            "refresh_s": 0.05,
            "read_timeout_s": 0.5,
            "timeout_s": 2.0,
            **options,
        }
        self.found: list[TierPage] = []
        self.lost: list[PageName] = []
        self.left: list[PageName] = []
        self.tier: ObjectTier

    def open(
        self,
        known: Sequence[int] = (1,),
        capacity: int = 64 * SEGMENT,
        facts: Callable[[int], SpaceFacts | None] = shared_facts,
    ) -> list[TierPage]:
        """What its scan finds."""
        settings = TierSettings(
            *(self.path.name, self.path, capacity, self.options, self.left.extend),
            facts=facts,
            found=self.found.extend,
            lost=self.lost.extend,
        )
        self.tier = ObjectTier(settings)
        return [one for batch in self.tier.scan(known) for one in batch]

    def put(self, *numbers: int, space: int = 1, length: int = LENGTH) -> list[int]:
        pages, data = zip(*(page(n, length, space) for n in numbers), strict=True)
        return self.tier.put(pages, data).statuses

    def read(self, *numbers: int, space: int = 1, length: int = LENGTH) -> list[int]:
        """The statuses; what is loaded is compared."""
        into = [memory(length) for _ in numbers]
        results = self.tier.read([name(n, length, space) for n in numbers], into)
        for n, data, result in zip(numbers, into, results, strict=True):
            if result.page is not None:
                assert bytes(data[:length]) == bytes(page(n, length)[1][:length]), "wrong bytes"
                assert (result.page.space, result.page.key) == (space, page(n)[0].key)
        return [result.status for result in results]

    def until(self, holds: Callable[[], bool], within_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline_s, "it did not become true"
            self.tier.maintain()
            time.sleep(0.005)

    def until_uploaded(self) -> None:
        self.until(lambda: not list(self.path.glob("*.seg")))

    def until_found(self, *numbers: int) -> None:
        keys = {page(n)[0].key for n in numbers}
        self.until(lambda: keys <= {one.key for one in self.found})


MakeNode = Callable[..., Node]
"""By name, endpoint, URL of the bucket and options; see the fixture `nodes` of tests/kvpool/tiers/object."""


@contextmanager
def moto_bucket() -> Iterator[str]:
    """The address of a real S3 server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        assert httpx.put(f"{endpoint}/{BUCKET}").status_code == 200
        yield endpoint
    finally:
        server.stop()
