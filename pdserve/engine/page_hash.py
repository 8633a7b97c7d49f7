"""SGLang's page keys, computed from token ids alone.

The key of a page is `sha256(key of the page before || the page's token ids as little-endian u32)`, chained from the
request's first page, so it names the page's tokens and everything before them. The first page's predecessor is empty,
or the digest of the request's cache namespace (`extra_key`, `cache_salt`). Only whole pages have a key.

Source: sglang/srt/mem_cache/cpp_utils/hash_binding.cpp and mem_cache/utils.py (`storage_namespace_seed`), 0.5.23.
Not covered: bigram keys of EAGLE drafts, and ids beyond 32 bits.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

_U32 = "I"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Digest that starts the chain of a request with `extra_key` or `cache_salt`; empty bytes when both are None."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
            continue
        encoded = part.encode("utf-8")
        digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def chain_digests(token_ids: Sequence[int], page_size: int, prior_digest: bytes) -> list[bytes]:
    """32-byte digests of consecutive pages of `token_ids`; a last partial page is hashed too.

    Raises OverflowError for ids that do not fit in 32 bits.
    """
    words = array(_U32, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    packed = memoryview(words).cast("B")
    step = page_size * words.itemsize
    digests: list[bytes] = []
    for start in range(0, len(packed), step):
        page = hashlib.sha256(prior_digest)
        page.update(packed[start : start + step])
        prior_digest = page.digest()
        digests.append(prior_digest)
    return digests


def page_keys(
    token_ids: Sequence[int], page_size: int, *, extra_key: str | None = None, cache_salt: str | None = None
) -> list[str]:
    """Hex keys of the whole pages of `token_ids`, as SGLang names them to its storage backend.

    An empty `extra_key` or `cache_salt` counts as None, as in SGLang's request handling.
    """
    whole = len(token_ids) // page_size * page_size
    seed = namespace_seed(extra_key or None, cache_salt or None)
    return [digest.hex() for digest in chain_digests(token_ids[:whole], page_size, seed)]
