from __future__ import annotations

import numpy as np
import xxhash

from pdserve.kvpool.protocol import page_bytes


def test_cutting_a_page_differently_keeps_its_checksum() -> None:
    page = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    whole = page_bytes.checksum_page((page,))
    assert whole == xxhash.xxh3_64_intdigest(page.tobytes())
    assert page_bytes.checksum_page((page[:7], page[7:4096], page[4096:])) == whole
    running = page_bytes.start()
    running.update(page[:1].data)
    running.update(page[1:].data)
    assert page_bytes.finish(running) == whole


def test_a_digest_of_zero_is_not_taken_for_none() -> None:
    class ZeroDigest:
        def intdigest(self) -> int:
            return 0

    assert page_bytes.finish(ZeroDigest()) != page_bytes.NO_CHECKSUM  # type: ignore[arg-type]
