from __future__ import annotations

import numpy as np
import xxhash

from pdserve.kvpool import checksum


def test_cutting_a_page_differently_keeps_its_checksum() -> None:
    page = np.random.default_rng(1).integers(0, 256, 100_000, np.uint8)
    whole = checksum.checksum_page((page,))
    assert whole == xxhash.xxh3_64_intdigest(page.tobytes())
    assert checksum.checksum_page((page[:7], page[7:4096], page[4096:])) == whole
    running = checksum.start()
    running.update(page[:1].data)
    running.update(page[1:].data)
    assert checksum.finish(running) == whole


def test_one_flipped_bit_changes_the_checksum() -> None:
    page = np.zeros(4096, np.uint8)
    before = checksum.checksum_page((page,))
    page[4095] ^= 1
    assert checksum.checksum_page((page,)) != before


def test_a_digest_of_zero_is_not_taken_for_none() -> None:
    class ZeroDigest:
        def intdigest(self) -> int:
            return 0

    assert checksum.finish(ZeroDigest()) != checksum.NO_CHECKSUM  # type: ignore[arg-type]
