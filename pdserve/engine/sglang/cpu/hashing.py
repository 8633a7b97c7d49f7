"""SGLang's page hashes by `hashlib` in place of its native extension, which is compiled on first use."""

from __future__ import annotations

import hashlib
from typing import Any

from pdserve.pages import page_hashes, token_bytes


def get_native_hash(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Same result as `sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash`.

    Without `page_size` one hex digest of all tokens, else a list of one per page, the last partial page
    included. `token_ids` is a list, an array or a `RadixKey`, which has a token more than its length says
    where it is of pairs (EAGLE).
    """
    pairs = bool(getattr(token_ids, "is_bigram", False))
    raw_token_ids = getattr(token_ids, "raw_token_ids", None)
    raw = raw_token_ids() if raw_token_ids is not None else getattr(token_ids, "token_ids", token_ids)
    raw = raw[: len(token_ids) + pairs]
    if page_size is None:
        return _digest(prior_digest or b"", raw, pairs).hex()
    digests = page_hashes(raw, page_size, prior_digest, pairs=pairs)
    rest = raw[len(digests) * page_size :]
    if len(rest) > pairs:
        digests.append(_digest(digests[-1] if digests else prior_digest or b"", rest, pairs))
    return [digest.hex() for digest in digests]


def _digest(prior_digest: bytes, tokens: Any, pairs: bool) -> bytes:
    return hashlib.sha256(prior_digest + token_bytes(tokens, pairs=pairs)).digest()
