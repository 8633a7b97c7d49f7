"""SGLang's page hashes by `hashlib` in place of its native extension, which is compiled on first use."""

from __future__ import annotations

from typing import Any

from pdserve.engine.page_hash import chain_digests


def get_native_hash(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Same result as `sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash`.

    Without `page_size` one hex digest of all tokens, else a list of one per page. `token_ids` is a list, an array or
    a `RadixKey`. Raises NotImplementedError for bigram keys (EAGLE), which need the native extension.
    """
    if getattr(token_ids, "is_bigram", False):
        raise NotImplementedError("bigram page keys need SGLang's native hash extension")
    raw_token_ids = getattr(token_ids, "raw_token_ids", None)
    raw = raw_token_ids() if raw_token_ids is not None else getattr(token_ids, "token_ids", token_ids)
    raw = raw[: len(token_ids)]
    prior = prior_digest or b""
    if page_size is None:
        return chain_digests(raw, max(1, len(raw)), prior)[0].hex()
    return [digest.hex() for digest in chain_digests(raw, page_size, prior)]
